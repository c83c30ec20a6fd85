"""The figures of measured plans: a step's time, and its share of what was predicted."""

from benchmarks.balance import ranks


def test_a_step_adds_each_micro_batchs_slowest_rank():
    found = [{"clock": [1.0, 4.0]}, {"clock": [3.0, 2.0]}]
    assert ranks.seconds_of(found, "clock") == 7.0


def test_the_table_has_measured_and_relative_seconds():
    seconds = {"auto": (2.0, 2.1), "zigzag": (2.5, 2.4), "contiguous": (3.0, 4.2)}
    methods = {
        name: {"predicted": predicted, "medians": {"core": median}}
        for name, (predicted, median) in seconds.items()
    }
    row = {"ranks": 4, "context": 2048, "documents": [1, 2], "methods": methods}
    line = ranks.table([row]).splitlines()[-1]
    assert line == "| 4 | 2,048 | 2 | core | 2,100 | 1.050 | 0.960 | 1.400 | 1.143 | 2.000 |"
