"""A blocking client of a running job's coordinator, for other processes."""

import http.client
import json
import ssl
from typing import TypeVar

import msgspec

from regrow.core import tls
from regrow.core.errors import CoordinatorGone, DeadlineExceeded, NoPlaceYet, UsageError
from regrow.core.ids import Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import FaultSpec
from regrow.core.wire import UNREADABLE
from regrow.membership.admission import LOCKED, JoinOffer, JoinRequest
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import DrainRequest, MoveRequest, ScaleRequest
from regrow.membership.view import JobView
from regrow.observe.watch.present import JobFigures

Answer = TypeVar("Answer", bound=msgspec.Struct)


class CoordinatorClient:
    """Client of one job's coordinator, for an operator or another node.

    Args:
        address: `host:port`.
        token: the job's secret.
        timeout: longest wait for one answer, in seconds.
    """

    def __init__(self, address: str, token: str, *, timeout: Seconds = 10.0) -> None:
        self._address = address
        self._token = token
        self._timeout = timeout

    def spec(self) -> JobSpec:
        """The specification with which the job was started."""
        return self._get("/job", JobSpec)

    def status(self) -> JobView:
        """The job's present state."""
        return self._get("/status", JobView)

    def figures(self) -> JobFigures:
        """The progress of the job."""
        return self._get("/figures", JobFigures)

    def kill(self, fault: FaultSpec) -> None:
        """Inject a fault into one worker."""
        self._ask("POST", "/kill", msgspec.json.encode(fault))

    def scale(self, request: ScaleRequest) -> AnswerScale:
        """Request another number of replicas; returns the decision."""
        return self._post("/scale", request, AnswerScale)

    def drain(self, request: DrainRequest) -> AnswerScale:
        """Request that a node be given back; returns the decision."""
        return self._post("/drain", request, AnswerScale)

    def move(self, request: MoveRequest) -> AnswerScale:
        """Request that ranks move to another node; returns the decision."""
        return self._post("/move", request, AnswerScale)

    def join(self, request: JoinRequest) -> JoinOffer:
        """Request to join as another node; returns what the node needs. Raises `UsageError` if it may not join."""
        return self._post("/join", request, JoinOffer)

    def stop(self, reason: str, *, patience: Seconds) -> None:
        """Ask the job to end; `patience`: seconds to save its state first, if it writes checkpoints."""
        self._ask("POST", f"/stop?patience={patience:g}", reason.encode())

    def _get(self, path: str, kind: type[Answer]) -> Answer:
        return self._decoded(self._ask("GET", path, None), kind)

    def _post(self, path: str, body: msgspec.Struct, kind: type[Answer]) -> Answer:
        return self._decoded(self._ask("POST", path, msgspec.json.encode(body)), kind)

    def _decoded(self, answer: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(answer, type=kind)
        except UNREADABLE as error:
            raise UsageError(
                f"{self._address} did not answer as a coordinator of this version: {error}",
                hint="use the regrow that started the job",
            ) from error

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        context = tls.calling()
        connection = (
            http.client.HTTPConnection(self._address, timeout=self._timeout)
            if context is None
            else http.client.HTTPSConnection(self._address, timeout=self._timeout, context=context)
        )
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._address} did not answer within {self._timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            hint = tls.ALIKE if isinstance(error, ssl.SSLError) else "the job may just have ended, or it has TLS"
            raise CoordinatorGone(f"no coordinator answers at {self._address}: {error}", hint=hint) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise refusal_of(self._address, response.status, answer)
        return answer


def refusal_of(address: str, status: int, answer: bytes) -> UsageError:
    """The error for a request that a coordinator refused."""
    try:
        parsed = json.loads(answer)
        kind = NoPlaceYet if status == LOCKED else UsageError
        return kind(str(parsed["error"]), hint=str(parsed.get("hint", "")))
    except (ValueError, KeyError, TypeError):
        return UsageError(f"{address} refused with HTTP status {status}", hint="is that a regrow coordinator?")
