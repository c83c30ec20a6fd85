"""The code of the documentation runs, and prints what the pages say.

The python blocks of a page run in order and share their names, in a process of their own. A page
that makes a gloo group runs on as many ranks as it says behind torchrun, or on two. A ```text block
right behind a python block is what that one prints, the ranks one after another: "..." stands for
anything, and numbers that were measured or rounded may differ a little.
"""

import contextlib
import io
import math
import os
import re
import socket
import traceback
import warnings

import pytest
import torch

from tests.support.pages import NAMES, ROOT, Block, python_of
from tests.support.processes import PROCESSES

QUICK = "README.md", "docs/concepts.md", "docs/guides/training.md"
PAGES_WITH_CODE = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
    for name in NAMES
    if python_of(ROOT / name)
]
SECONDS = 60  # that a page may take
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import what is slow before the first test, not in it."""
    process = PROCESSES.Process(target=print)
    process.start()
    process.join()


def execute(page, blocks, rank, ranks, port, folder, pipe):
    """Run blocks of a page as one rank, and send what each printed, or the error."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    names, printed = {"__name__": "__main__"}, []
    try:
        for block in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                code = "\n" * block.line + block.text  # so that errors name the page's line
                exec(compile(code, str(page), "exec"), names)
            printed.append(output.getvalue())
        pipe.send(printed)
    except BaseException:
        pipe.send(traceback.format_exc())


def ranks_of(page, blocks):
    """Return how many ranks a page has: as many as it says, or two, if it makes a gloo group."""
    gloo = re.compile(r'init_process_group\(.*"gloo"')
    if not any(gloo.search(block.text) for block in blocks):
        return 1
    said = re.search(r"^torchrun --nproc-per-node (\d+) \w+\.py$", page.read_text(), re.MULTILINE)
    return int(said[1]) if said else 2


def run_blocks(page, blocks, folder):
    """Return what each block printed, as one text a block: rank after rank."""
    ranks = ranks_of(page, blocks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = PROCESSES.Pipe()
        arguments = (page, blocks, rank, ranks, port, folder, theirs)
        processes.append(PROCESSES.Process(target=execute, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(SECONDS), f"{page} took longer than {SECONDS} s"
        answers = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()  # what they were for is done
            process.join()
    errors = [answer for answer in answers if isinstance(answer, str)]
    assert not errors, "\n".join(errors)
    return ["".join(texts) for texts in zip(*answers, strict=True)]


def same(shown, printed):
    """Whether two outputs are the same to a reader."""
    shown, printed = shown.split(), printed.split()
    if "..." in shown:
        cut = shown.index("...")
        head, tail = shown[:cut], shown[cut + 1 :]
        starts = len(printed) >= len(head) and same(" ".join(head), " ".join(printed[:cut]))
        rest = range(len(printed) - len(head) + 1)
        return starts and any(same(" ".join(tail), " ".join(printed[cut + i :])) for i in rest)
    if len(shown) != len(printed):
        return False
    return all(same_word(*pair) for pair in zip(shown, printed, strict=True))


def same_word(shown, printed):
    """Whether two words are the same, but for last digits of decimals and sizes of errors."""
    if NUMBER.split(shown) != NUMBER.split(printed):
        return False
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        x, y = (float(number.replace(",", "")) for number in (a, b))
        rounding = "e-" in a and "e-" in b
        tolerance = 0.02 if "." in a else 0.0
        near = y / 10 <= x <= 10 * y if rounding else math.isclose(x, y, rel_tol=tolerance)
        if not near:
            return False
    return True


@pytest.mark.parametrize("name", PAGES_WITH_CODE)
def test_code_on_a_page_prints_its_shown_output(name, tmp_path):
    blocks = python_of(ROOT / name)
    for block, printed in zip(blocks, run_blocks(ROOT / name, blocks, tmp_path), strict=True):
        if block.output is not None:
            assert same(block.output, printed), f"{name}, line {block.line}: it prints\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("rank 0: 512 of 1,024, error 4.8e-07", "rank 0: 512 of 1,024, error 1.2e-07", True),
        ("rank 0: 512 tokens", "rank 0: 513 tokens", False),
        ("1.97 times", "1.96 times", True),
        ("1.97 times", "1.80 times", False),
        ("error 4.8e-07", "error 4.8e-05", False),
        ("a ... e f", "a b c d e f", True),
        ("a ... e f", "a b c d e g", False),
        ("a\n...", "a", True),
        ("a b", "a", False),
    ],
)
def test_outputs_are_compared_as_a_reader_would(shown, printed, expected):
    assert same(shown, printed) == expected


def test_the_quickstart_is_the_example():
    (block,) = [block for block in python_of(ROOT / "README.md") if "torchrun" in block.text]
    assert block.text == (ROOT / "examples/quickstart.py").read_text()


def test_the_swap_in_has_one_devices_gradients(tmp_path):
    program = Block("python", (ROOT / "examples/swap_in.py").read_text(), 0)
    (printed,) = run_blocks(ROOT / "examples/swap_in.py", [program], tmp_path)
    assert re.findall(r"rank (\d): 128 of 256 tokens", printed) == ["0", "1"]


BEFORE_AND_AFTER = """
import torch, seqpar, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("gloo")
exec(layers)
torch.manual_seed(0)
before, after, x = Before(32, 4), After(32, 4), torch.randn(48, 32)
after.load_state_dict(before.state_dict())
attn, layout = seqpar.make_attention("ring", dist.group.WORLD), seqpar.Layout.zigzag(48, 2)
out = layout.unshard(after(layout.shard(x, dist.get_rank()), attn, layout), dist.group.WORLD)
print(torch.allclose(out, before(x), atol=1e-6))
"""


def test_the_layers_of_readme_agree(tmp_path):
    (layers,) = [block for block in python_of(ROOT / "README.md") if "class After" in block.text]
    program = f"layers = {layers.text!r}\n{BEFORE_AND_AFTER}"
    (printed,) = run_blocks(ROOT / "README.md", [Block("python", program, 0)], tmp_path)
    assert printed.split() == ["True", "True"]
