"""Asks the HTTP endpoint of an engine: with a time limit, a size limit and no trust."""

import http.client
import urllib.error
import urllib.parse
import urllib.request
from typing import TypeVar

import msgspec

ANSWER_BYTES_MAX = 16 << 20
TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


class EndpointError(Exception):
    """No answer, or none of the kind that was asked for."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def url_of(text: str) -> str:
    """``host:port`` or an address beginning with http:// as such an address; raises
    `EndpointError`."""
    url = text if "://" in text else f"http://{text}"
    parts = urllib.parse.urlsplit(url)
    try:
        good = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        good = False
    if not good:
        raise EndpointError(f"found {text!r}; expected host:port of an engine's http_port")
    return f"http://{parts.netloc}"


def ask(url: str, page: str, kind: type[Answer], timeout_s: float = TIMEOUT_S) -> Answer:
    """What ``url``/``page`` answers, as a struct; raises `EndpointError`."""
    try:
        with _opener.open(f"{url}/{page}", timeout=timeout_s) as answer:
            body = answer.read(ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        reason = getattr(problem, "reason", None) or problem
        raise EndpointError(f"{url} does not answer: {reason}") from None
    if len(body) > ANSWER_BYTES_MAX:
        raise EndpointError(f"{url} answers with more than {ANSWER_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise EndpointError(f"{url} is no endpoint of efa-kv: {problem}") from None
