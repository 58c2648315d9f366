"""A receiver of Alertmanager's webhooks: prints each notification as a line of JSON.

python3 notifications.py [HOST:]PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        notification = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps(notification), flush=True)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Omits the access log, which would mix with the notifications."""


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    HTTPServer((host, int(port)), Receiver).serve_forever()
