import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported

from tests.ranks import Pool

hypothesis.settings.register_profile("seqpar", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("seqpar")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Four gloo processes; `pool(ranks, function, *arguments)` runs function(group, *arguments) on the first `ranks`."""
    with Pool(4) as ranks:
        yield ranks
