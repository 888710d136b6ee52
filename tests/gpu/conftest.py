"""What tests on a GPU share."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda:0")


@pytest.fixture
def needs_memory():
    """Skips where fewer bytes of the GPU are free; afterwards PyTorch gives back what it holds.

    For tests marked `alone`: others side by side would count on the same bytes.
    """

    def check(count):
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(0)[0] < count:
            pytest.skip(f"less than {count / 1e9:.0f} GB of memory are free")

    yield check
    torch.cuda.empty_cache()
