"""Clients of the tests' own servers, which serve HTTP without TLS.

By default httpx reads the certificates of all authorities for each client, and for each call
without a client: 20 ms of a processor.
"""

from functools import partial

import httpx

async_http_client = partial(httpx.AsyncClient, verify=False)
http_get = partial(httpx.get, verify=False)
http_post = partial(httpx.post, verify=False)
