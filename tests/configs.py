"""``conf/`` for tests that compose it themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra import initialize_config_dir

from harness.config import register
from harness.help import CONF


@contextmanager
def composing() -> Iterator[None]:
    """``hydra.compose`` reads ``conf/`` inside, as the command line does."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
