"""Messages of a job as bytes."""

import msgspec

from regrow.core.ids import Generation, NodeId, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.store import StoreMultiSet, StoreRequest
from regrow.core.messages.unions import AgentFact
from regrow.core.messages.vocabulary import ErrorReport
from regrow.core.wire import FrameCodec

OF_LATIN_1 = "caf\udce9.jpg"


def test_a_file_name_in_an_older_encoding_is_sent_as_python_shows_it() -> None:
    codec: FrameCodec[AgentFact] = FrameCodec(AgentFact)
    error = ErrorReport("ValueError", OF_LATIN_1, f"ValueError: {OF_LATIN_1}\n")
    committed = facts.WorkerCommitted(WorkerId("w0"), Generation(1), StepNo(3), 0.5, 0.25, {OF_LATIN_1: 1.5})
    for fact in (facts.WorkerFailed(WorkerId("w0"), error, StepNo(7)), facts.NodeProgress(NodeId("n0"), [committed])):
        (came,) = codec.take(bytearray(codec.frame(fact)))
        assert type(came) is type(fact)
        assert repr(came) == repr(fact).replace("\\udce9", "\\\\udce9")


def test_bytes_beside_such_a_name_stay_as_they_are() -> None:
    codec: FrameCodec[StoreRequest] = FrameCodec(StoreRequest)
    (came,) = codec.take(bytearray(codec.frame(StoreMultiSet(["a", OF_LATIN_1], [b"\xff\x00", b""]))))
    assert came == StoreMultiSet(["a", r"caf\udce9.jpg"], [b"\xff\x00", b""])


def test_a_message_in_unicode_is_encoded_as_it_is() -> None:
    codec: FrameCodec[StoreRequest] = FrameCodec(StoreRequest)
    message = StoreMultiSet(["café"], [b"1"])
    assert codec.frame(message)[4:] == msgspec.msgpack.encode(message)
