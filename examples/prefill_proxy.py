"""Send each prompt to a vLLM that computes it, and then to one that decodes.

    python examples/prefill_proxy.py --prefill URL --decode URL [--port 8080]

Both serve one model over one store, the first with "storage_write": "through" (see
docs/vllm.md). Clients talk to this as to one vLLM, at http://127.0.0.1:PORT. If the
first fails, the second computes the prompt.
"""

import argparse
import contextlib
import http.server
import json
import sys
import urllib.error
import urllib.request

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def post(url, path, body):
    """Post a body of JSON; return the answer, to be read and closed."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + path, data, headers))


def prefill(url, path, body):
    """Prefill a prompt on one engine; return kv_transfer_params for the other."""
    first = body | {"stream": False, "kv_transfer_params": TO_PREFILL}
    first.pop("stream_options", None)
    for name in ("max_tokens", "max_completion_tokens"):
        if name == "max_tokens" or name in body:
            first[name] = 1
    try:
        with post(url, path, first) as answer:
            return json.load(answer).get("kv_transfer_params")
    except (OSError, ValueError) as error:
        print(f"prefill at {url} failed: {error}", file=sys.stderr, flush=True)
        return None


class Proxy(http.server.BaseHTTPRequestHandler):
    """Answers one client; `prefill_url` and `decode_url` are set below."""

    def do_POST(self):
        """Pass a request on to one engine, and then to the other."""
        length = int(self.headers.get("Content-Length", 0))
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError as error:
            self.send_error(400, f"the body is no JSON: {error}")
            return
        params = prefill(self.prefill_url, self.path, body)
        if params is not None:
            body["kv_transfer_params"] = params
        try:
            answer = post(self.decode_url, self.path, body)
        except urllib.error.HTTPError as error:
            answer = error  # Its text says more than its number.
        except OSError as error:
            self.send_error(502, f"decode at {self.decode_url} failed: {error}")
            return
        with answer:
            self.send_response(answer.status)
            kind = answer.headers.get("Content-Type", "application/json")
            self.send_header("Content-Type", kind)
            self.end_headers()
            while chunk := answer.read1():  # As they come, where they are streamed.
                self.wfile.write(chunk)


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--prefill", required=True, metavar="URL", help="computes prompts")
parser.add_argument("--decode", required=True, metavar="URL", help="generates answers")
parser.add_argument("--port", type=int, default=8080, help="0 for any")
options = parser.parse_args()
Proxy.prefill_url = options.prefill.rstrip("/")
Proxy.decode_url = options.decode.rstrip("/")
server = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Proxy)
print(f"http://127.0.0.1:{server.server_port} until interrupted", flush=True)
with contextlib.suppress(KeyboardInterrupt):
    server.serve_forever()
