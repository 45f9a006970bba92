"""The server of Kubeflow Trainer (2.3) that takes the status of TrainJobs."""

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trustme

_TOKEN = "of the service account"


@contextlib.contextmanager
def status_server(folder: Path) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """The variables of a pod, and the statuses that were heard."""
    heard: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            allowed = self.headers["Authorization"] == f"Bearer {_TOKEN}"
            if allowed:
                heard.append(body["trainerStatus"])
            self.send_response(200 if allowed else 403)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "status-ca.crt"))
    (folder / "status-token").write_text(_TOKEN)
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield (
            {
                "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{server.server_port}/status",
                "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "status-ca.crt"),
                "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "status-token"),
            },
            heard,
        )
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
