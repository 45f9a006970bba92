"""The string by which SGLang's clients request the penalty; needs neither SGLang nor torch."""

import json
import struct

_MODULE = f"{__package__}.sglang"
_CLASS = "LZSglangProcessor"


def sglang_processor() -> str:
    """Value of a request's `custom_logit_processor`: the string that SGLang's `LZSglangProcessor.to_str()` makes.

    SGLang expects a class pickled by its name, in hexadecimal: opcodes of pickle's protocol 4 (PEP 3154).
    """
    names = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94" for name in (_MODULE, _CLASS))
    body = names + b"\x93\x94."
    return json.dumps({"callable": (b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body).hex()})
