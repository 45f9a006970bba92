"""Each body reads the next bytes of an open file."""

import pydoc_data.topics
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "book (where it is read)"
NAMED = ("book", "BufferedReader")

session = regrow.init(seed=39)
book = open(pydoc_data.topics.__file__, "rb")  # noqa: SIM115
net = DDP(nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        text = torch.frombuffer(bytearray(book.read(65)), dtype=torch.uint8).long()
        loss = nn.functional.cross_entropy(net(text[:-1]), text[1:])
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
