"""Modules that jobs with compilation have imported before they are forked."""

COMPILER = (
    "torch.distributed.optim",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    *(f"torch._dynamo.backends.{name}" for name in ("cudagraphs", "distributed", "inductor", "onnxrt", "tvm")),
    "torch._dynamo.testing",
    "torch._export.db.logging",
)
"""Modules that `torch.compile` imports at its first use: some seconds of a processor for each process, otherwise."""
