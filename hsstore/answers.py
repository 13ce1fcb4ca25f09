"""What an answer that is no success means: the error the service raised, or something that may pass.

Responsible for mapping problem answers (RFC 9457), answers of anything else that speaks HTTP, and broken connections to
the error tree. Leaves trying again to `client`.
"""

from __future__ import annotations

import http.client
import random

import msgspec

from hsstore.api import Problem
from hsstore.errors import HsstoreError, ServiceError, UnauthorizedError, class_of

MAX_RETRY_AFTER_SECONDS = 30.0
MAX_PROBLEM_BYTES = 1 << 20
_MAY_PASS = (502, 503, 504)


class TransientError(ServiceError):
    """Worth another try, after `retry_after` seconds when the service said so."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def error_of(url: str, response: http.client.HTTPResponse) -> HsstoreError:
    """The error a problem answer stands for; `TransientError` where trying again may help."""
    try:
        problem = msgspec.json.decode(response.read(MAX_PROBLEM_BYTES), type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = None
    if response.status in _MAY_PASS and (problem is None or problem.kind == ServiceError.kind):
        said = problem.detail if problem else response.reason
        return TransientError(
            f"{url} answered {response.status}: {said}", _seconds(response.headers.get("Retry-After"))
        )
    if problem is None:
        if response.status == 401:
            return UnauthorizedError(f"{url} wants a token", hint="set HSSTORE_TOKEN")
        return ServiceError(f"{url} answered {response.status} {response.reason}", hint="is this an hsstore service?")
    class_ = class_of(problem.kind, ServiceError)
    return class_(f"{problem.detail} [{url}]", hint=problem.hint)


def worth_another_try(error: Exception) -> bool | float:
    if not isinstance(error, TransientError):
        return False
    if error.retry_after is None:
        return True
    return error.retry_after + random.uniform(0.05, 0.5)  # all ranks were told the same second


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, bounded; a date counts as absent."""
    return min(float(retry_after), MAX_RETRY_AFTER_SECONDS) if retry_after and retry_after.isdecimal() else None


def broken(url: str, error: Exception) -> TransientError:
    """The error of a connection that broke, timed out or never came about."""
    return TransientError(f"no complete answer from {url}: {str(error) or type(error).__name__}")
