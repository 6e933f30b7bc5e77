"""As much of an API server as a picker asks for: pods of a node that runs here, a manifest's pool."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kubelet import NAMESPACE, Node
from manifests import kind

from sumibi.gateway.epp.tls import self_signed

TOKEN = "a-service-account-s-token"


class ApiServer:
    """Serves with TLS in threads of its own; `account` is what a pod would find of it."""

    def __init__(self, directory: Path, node: Node) -> None:
        self.account = directory / "serviceaccount"
        self.account.mkdir()
        key, certificate = self_signed()
        (directory / "key").write_bytes(key)
        (self.account / "ca.crt").write_bytes(certificate)
        (self.account / "token").write_text(TOKEN)
        self.asked: set[tuple[str, str]] = set()
        """(API group, resource) of every question."""
        self._node = node
        self._changed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.account / "ca.crt", directory / "key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """What every container of the cluster has."""
        return {
            "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_address[1]),
        }

    def look(self) -> None:
        """Something about pods changed: watches end, and lists are asked for again."""
        self._changed.set()
        self._changed = threading.Event()

    def wait(self) -> None:
        self._changed.wait(20)

    def items(self, resource: str, query: dict[str, str]) -> list[dict]:
        if resource == "inferencepools":
            pools = kind(self._node.things, "InferencePool")
            return [p for p in pools if query["fieldSelector"] == f"metadata.name={p['metadata']['name']}"]
        wanted = dict(word.split("=") for word in query["labelSelector"].split(","))
        pods = self._node.running.values()
        return [_pod(pod) for pod in pods if wanted.items() <= pod.pod.labels.items()]

    def close(self) -> None:
        self.look()
        self._server.shutdown()
        self._server.server_close()


def _pod(pod) -> dict:
    ready = not pod.ended and pod.probe("readinessProbe")
    return {
        "metadata": {"name": pod.name, "labels": pod.pod.labels},
        "status": {
            "podIP": pod.address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer

    def do_GET(self) -> None:
        target = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        parts = target.path.strip("/").split("/")
        self.api.asked.add(("" if parts[0] == "api" else parts[1], parts[-1]))
        allowed = (
            self.headers["authorization"] == f"Bearer {TOKEN}" and f"/namespaces/{NAMESPACE}/" in target.path
        )
        self.send_response(200 if allowed else 403)
        self.end_headers()
        if not allowed:
            return
        if "watch" in query:
            self.api.wait()
        else:
            page = {"metadata": {"resourceVersion": "1"}, "items": self.api.items(parts[-1], query)}
            self.wfile.write(json.dumps(page).encode())

    def log_message(self, *_: object) -> None:
        pass
