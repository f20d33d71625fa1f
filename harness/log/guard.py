"""Keeps a dashboard's library from stopping, slowing or outliving a measurement."""

import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console


def bounded(action: Callable[[], Any], seconds: float) -> Any:
    """``action``'s result, waited for at most so long; it runs on a thread of its own, which ends with the process.

    Raises:
        TimeoutError: it is not back yet; what it is doing then goes on unheeded.
        Exception: what it raised.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call, daemon=True, name="harness-log")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds:g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def say(line: str) -> None:
    """One dim line, apart from what the run prints."""
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


class Guard:
    """Calls into a library for as long as it behaves.

    The first failure, of whatever kind, or the first wait that is too long, prints one dim line; from then on nothing
    is called until ``reset``. The caller waits for each call, so none runs into what it measures next.
    """

    def __init__(self, name: str, remedy: Callable[[], str]) -> None:
        """``remedy`` says, when it is asked for, how to send later what is not sent now."""
        self._name, self._remedy = name, remedy
        self.working = True

    def __call__(self, action: Callable[[], Any], seconds: float) -> Any:
        """``action``'s result; None when it failed, now or before."""
        if not self.working:
            return None
        try:
            return bounded(action, seconds)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit too: a library that wants to quit must not end the run
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Stop calling, and say so once."""
        self.working = False
        reason = " ".join(str(error).split()) or type(error).__name__
        say(f"{self._name} stopped logging ({reason}). The run goes on; {self._remedy()}")

    def reset(self) -> None:
        """Trust it again, for another run."""
        self.working = True
