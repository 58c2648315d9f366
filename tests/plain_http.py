"""HTTP clients without TLS for servers in tests.

By default httpx reads the certificates of all authorities for each client and for each call without
a client, which takes 20 ms. The default timeout of httpx, five seconds, is short on a busy machine.
"""

from functools import partial

import httpx

OPTIONS = {"verify": False, "timeout": 60}

async_http_client = partial(httpx.AsyncClient, **OPTIONS)
http_client = partial(httpx.Client, **OPTIONS)
http_get = partial(httpx.get, **OPTIONS)
http_post = partial(httpx.post, **OPTIONS)
