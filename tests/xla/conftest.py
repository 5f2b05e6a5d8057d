"""Models on XLA's CPU device, which is the real torch_xla and the real compiler, and no TPU."""

import copy

import pytest
import torch_xla
import torch_xla.debug.metrics as metrics
from small import llama

DEVICE = "xla"


@pytest.fixture(autouse=True, scope="session")
def untuned(tmp_path_factory):
    """No table of ``optimus tune``: plans are the same for every user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def compiled():
    """How many graphs XLA has compiled so far, for whomever; what is pending is done first."""

    def count():
        torch_xla.sync()
        return metrics.counter_value("UncachedCompile") or 0

    return count


FIGURES = []


@pytest.fixture(scope="session")
def report():
    """Takes lines that are printed when all is done."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter):
    """What was counted."""
    for line in FIGURES:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def stock():
    """A small llama on the CPU, with weights large enough that its tokens differ."""
    return llama(hidden_size=64, intermediate_size=128, initializer_range=0.3)


@pytest.fixture(scope="session")
def wide():
    """One whose layers are large enough to be rounded, with a tied head."""
    return llama(hidden_size=256, intermediate_size=512, tie_word_embeddings=True)


def on_xla(model):
    """A copy of a model on XLA, where moving unties what is tied."""
    twin = copy.deepcopy(model).to(DEVICE)
    twin.tie_weights()
    return twin


@pytest.fixture(scope="session")
def moved():
    """``on_xla``."""
    return on_xla


@pytest.fixture(scope="session")
def zoo():
    """The default suite's builder of tiny models."""
    import zoo

    return zoo
