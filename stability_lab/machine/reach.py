"""Whether a host answers, found out within a time that holds."""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.error
import urllib.request

PROXY_REFUSES = 407


def no_answer(url: str, timeout_s: float) -> str | None:
    """Why `url` cannot be reached, through the proxy where one is set; None where the host answers in time.

    A connection alone says little, since proxies take one and then refuse, hang up or stay silent. So this is an HTTP
    request, and any status below 500 but a proxy's refusal is an answer.
    """
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            opener = urllib.request.build_opener()  # `urlopen` would keep the proxies of its first call
            opener.open(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
            outcome.append(None)
        except urllib.error.HTTPError as error:
            error.close()
            answers = error.code < 500 and error.code != PROXY_REFUSES
            outcome.append(None if answers else f"{url}: HTTP status {error.code}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            # The libraries that will connect have certificates of their own; whether those do is theirs to say.
            outcome.append(None if isinstance(reason, ssl.SSLCertVerificationError) else f"{url}: {reason}")

    # In a thread, because no timeout holds for the look-up of a name, nor for the answer as a whole.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"{url}: no answer within {timeout_s:g} s"
