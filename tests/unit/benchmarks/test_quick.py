"""The check of all contenders before a GPU's kernels are timed."""

from benchmarks.kernels import quick
from benchmarks.kernels import softmax_contenders as contenders
from seqpar.softmax.backends.kernel_order import CALLS


def test_wrong_and_failing_contenders_are_named(capsys):
    def fails(q, k, v):
        raise RuntimeError("no such kernel")

    def field(work):
        ours = contenders.ours(work, "aten")
        wrong = {"fails": fails, "doubles": lambda q, k, v: 2 * ours(q, k, v)}
        return {"ours": ours, "missing": None} | wrong

    assert quick.check(field) == ["fails", "doubles"]
    printed = capsys.readouterr().out
    assert "no such kernel" in printed and "doubles has wrong results" in printed


def test_each_row_of_kernels_has_a_workload(monkeypatch):
    monkeypatch.setattr(quick, "GPU", True)
    works = {(work.dim, work.softcap > 0): work for work in quick.workloads(by_backend=True)}
    for dim, softcap in CALLS.values():
        assert (dim, softcap > 0) in works
    assert set(quick.backends(works[128, True])) == {"default", "aten", "flash_attn", "triton"}


def test_backwards_that_are_deterministic_and_others_are_contenders(monkeypatch):
    """Of the default, and of FlashAttention-4, whose own default is a backward that is not."""
    work = quick.workloads(by_backend=False)[0]
    monkeypatch.setattr(quick, "GPU", True)

    def ours(work, backend, deterministic=True):
        return backend, deterministic

    def flash_attention_4(work, deterministic=False):
        return "FlashAttention-4", deterministic

    monkeypatch.setattr(contenders, "ours", ours)
    monkeypatch.setattr(contenders, "flash_attention_4", flash_attention_4)
    found = quick.libraries(work)
    assert next(iter(found)) == "default"
    assert found["default"] == ("default", True) and found["FA4 det."] == ("FlashAttention-4", True)
    assert found["default, not det."] == ("default", False)
    assert found["FA4"] == ("FlashAttention-4", False)
