import warnings
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

assert triton.knobs.runtime.interpret, "these tests are run by tests/kernels/test_interpreted.py"
# The interpreter computes on numpy arrays, where a masked lane may overflow.
warnings.filterwarnings("ignore", category=RuntimeWarning)

LAUNCHED: set[str] = set()
"""Told at the end, to whoever asks whether all have run."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def launched():
    """Names of the kernels that ran."""
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        LAUNCHED.add(self.__name__)
        run(self, *args, **kwargs)

    InterpretedFunction.run = noted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(" ".join(("launched:", *sorted(LAUNCHED))))
