"""What pages say holds: figures are those of committed results; commands, links and paths exist."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

import seqpar
from seqpar.__main__ import COMMANDS, load
from seqpar.strategies.registry import LINEAR, SOFTMAX
from tests.support.pages import NAMES, PAGES, ROOT, anchors_of, blocks_of, links_of, table_of

INTERFACE = runpy.run_path(str(ROOT / "docs/site/interface.py"))


def results(name, machine="*"):
    """Return the committed result of this name; name the machine if there are several."""
    (file,) = (ROOT / "benchmarks/results").glob(f"{machine}/{name}.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("name", "heading", "machine"),
    [
        ("README.md", "fp32, forward", "amd-epyc-2-cores"),
        ("docs/benchmarks/ranks.md", "fp32, forward", "amd-epyc-2-cores"),
        ("docs/benchmarks/ranks.md", "Intel Xeon", "intel-r-xeon-r-processor-2-cores"),
    ],
)
def test_the_table_of_ranks_is_the_committed_result(name, heading, machine):
    ratios = results("strategies", machine)["ratio_to_sdpa"]
    passes = ("forward", "forward+backward")
    table = table_of(ROOT / name, heading)
    assert len(table) == 4
    for contender, cells in table.items():
        keys = [f"{dtype}/{way}/{contender}" for dtype in ("fp32", "bf16") for way in passes]
        assert cells == [f"{ratios[key]:.2f}" for key in keys]


def test_the_table_of_large_groups_is_the_result():
    shown = []
    for row in results("large-groups")["rows"]:
        mesh = "" if row["mesh"] is None else f" {'x'.join(map(str, row['mesh']))}"
        whole = (f"{row['whole_cpu']:.1f}", f"{row['error']:.2%}") if "error" in row else ("", "")
        figures = f"{row['ranks']:,}", f"{row['cpu']:.1f}", f"{row['memory'] / 1e9:.1f}", *whole
        shown.append(f"| {' | '.join((row['strategy'] + mesh, *figures))} |".replace("  ", " "))
    page = (ROOT / "docs/benchmarks/simulate.md").read_text()
    assert "\n".join(["", *shown, ""]) in page


def test_the_table_of_links_is_the_committed_result():
    rows = results("network-softmax")["rows"]
    rows = [row for row in rows if (row["rate_mbit"], row["ratio"]) == (100, 1.5)]
    table = table_of(ROOT / "docs/benchmarks/network.md", "mesh, forward")
    assert set(table) == {row["contender"] for row in rows}
    for contender, cells in table.items():
        mine = [row for row in rows if row["contender"] == contender]
        times = [f"{row['communication'] * 1e3:,.0f}" for row in mine]
        shown = [f"{x} ({max(row['fraction'], 0):.0%})" for x, row in zip(times, mine, strict=True)]
        assert cells[:-1] == shown and len(mine) == 4
        assert cells[-1] == ", ".join(f"{row['bytes'] / 2**20:.1f}" for row in mine[:2])


def test_the_table_of_costs_is_the_committed_result():
    table = table_of(ROOT / "docs/benchmarks/costs.md", "held-out work")
    errors = results("costs")["errors"]
    assert set(table) == set(errors)
    for kind, sizes in errors.items():
        shown = [f"{x:.1%}" for x in (sizes["median"], sizes["ninth_decile"])]
        peers = sizes["median_of_pairs_alone"]
        assert table[kind] == [*shown, "" if peers is None else f"{peers:.1%}"]
    assert errors["all"]["median"] < 0.1


def test_the_table_of_recordings_is_the_committed_result():
    rows = results("recording")["rows"]
    page = (ROOT / "docs/guides/parity.md").read_text()
    for row in rows:
        times = f"{row['without']:.2f} | {row['with']:.2f} | {row['ratio']:.2f}"
        size = f"{row['bytes'] / 1e6:.1f}"
        assert f"| {row['width']} | {row['tokens']:,} | {times} | {size} |" in page
    assert max(row["ratio"] for row in rows) <= 2


def test_tables_of_disaggregated_plans_match_the_results():
    from benchmarks.balance import disaggregated, simulated_steps

    found = results("disaggregated-plans")
    page = (ROOT / "docs/benchmarks/disaggregated.md").read_text()
    assert disaggregated.table(found["curve"]) in page
    assert simulated_steps.summary(found["tables"]) in page


def test_tables_of_servers_and_steps_match_the_results():
    from benchmarks.network import disaggregated
    from benchmarks.servers import latency, run

    found = results("servers")
    page = (ROOT / "docs/benchmarks/servers.md").read_text()
    assert run.table(found["targets"]) in page and latency.table(found["latency"]) in page
    page = (ROOT / "docs/benchmarks/disaggregated.md").read_text()
    assert disaggregated.table(results("network-disaggregated")["rows"]) in page


def test_kernel_tables_are_the_committed_result():
    from benchmarks.kernels import tables

    page = (ROOT / "docs/benchmarks/kernels.md").read_text()
    assert tables.table(results("kernel-tables")["rows"]) in page


def test_the_table_of_kernels_is_the_committed_one():
    from tests.tools.aot_table import markdown

    assert markdown() in (ROOT / "docs/kernels.md").read_text()


def targets():
    """Return the Makefile's targets."""
    return set(re.findall(r"^([a-z][\w.-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(text):
    """Yield the words of each command, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def flags_known_to(path):
    """Return the flags that appear in a script or the modules beside it."""
    text = "".join(file.read_text() for file in path.parent.glob("*.py"))
    return set(re.findall(r'"(--[\w-]+)"', text))


def check_script(words):
    """Check a script with its flags, or a module with them."""
    known = set()
    if words[0] == "-m":
        path = ROOT / (
            words[1].replace("seqpar.kernels", "triton_kernels").replace(".", "/") + ".py"
        )
        if words[1] in ("pytest", "pip", "venv"):
            return
        if words[1] == "seqpar":
            assert words[2] in COMMANDS, words
            path = ROOT / f"seqpar/commands/{words[2]}.py"
            known = set(load(words[2])[1]._option_string_actions)
        arguments = words[2:]
    else:
        path, arguments = ROOT / words[0], words[1:]
    assert path.is_file(), f"there is no {path}"
    used = {word.split("=")[0] for word in arguments if word.startswith("--")}
    unknown = used - (known or flags_known_to(path)) - {"--help"}
    assert not unknown, f"{path} does not know {unknown}"


def check_command(words):
    """Check that what a command names exists."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        unknown = {
            word for word in rest if "=" not in word and not word.startswith("-")
        } - targets()
        assert not unknown, f"the Makefile has no {unknown}"
    elif program == "torchrun":
        options = list(rest)
        while options and options[0].startswith("--"):
            valued = options[0] in ("--nproc-per-node", "--max-restarts")
            assert valued or options[0] == "--standalone", options[0]
            options = options[2 if valued else 1 :]
        if options not in (["train.py"], ["decode.py"], ["idea.py"]):  # a reader's own
            check_script(options)
    elif program == "torchft_lighthouse":
        assert rest[::2] == ["--min_replicas"]
    elif program == "python":
        check_script(rest)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        named = {
            x for word in rest for part in re.findall(r"\[(.*)\]", word) for x in part.split(",")
        }
        assert named <= set(extras), f"there is no extra {named - set(extras)}"
        assert all((ROOT / word).exists() for word in rest if word.endswith(".txt"))
    elif program == "pytest":
        paths = [word.split("::")[0] for word in rest if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), paths
    else:
        assert program == "pre-commit", f"what is {program}?"


def test_blocks_are_code_commands_or_text():
    scripts = []
    for name, block in ((page, block) for page in NAMES for block in blocks_of(ROOT / page)):
        where = f"{name}, line {block.line}"
        assert block.language in ("python", "bash", "text"), f"{where}: ```{block.language}"
        if block.language == "bash":
            scripts.append(block.text)
            for words in commands(block.text):
                check_command(words)
    subprocess.run(["bash", "-n"], input="\n".join(scripts), text=True, check=True)


def test_links_lead_somewhere():
    for name in NAMES:
        for path, anchor in links_of(ROOT / name):
            assert path.exists(), f"{name} links to {path}"
            assert not anchor or anchor in anchors_of(path), f"{name} links to {path}#{anchor}"


def test_paths_in_prose_exist():
    folders = "seqpar|triton_kernels|tests|benchmarks|examples|docs"
    for name in NAMES:
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", (ROOT / name).read_text()):
            assert (ROOT / path).exists(), f"{name} names {path}"


def test_every_page_is_linked_from_the_index():
    reached, found = set(), [ROOT / "docs/index.md"]
    while found:
        page = found.pop()
        if page in reached:
            continue
        reached.add(page)
        linked = (path for path, _ in links_of(page) if path.suffix == ".md" and path.exists())
        found += [path for path in linked if (ROOT / "docs") in path.parents]
    assert reached >= {page for page in PAGES if (ROOT / "docs") in page.parents}


def test_every_strategy_has_a_page_and_a_row():
    """ZeCO's All-Scan is a transport of LASP-2, with a page of its own."""
    known = {*SOFTMAX, *LINEAR, "zeco"}
    assert {page.stem for page in (ROOT / "docs/strategies").glob("*.md")} == known | {"index"}
    rows = table_of(ROOT / "docs/strategies/index.md", "| strategy |")
    assert {re.match(r"\[(\w+)\]", first)[1] for first in rows} == known


def test_the_interface_page_is_made_from_docstrings():
    made = INTERFACE["page"]()
    page = ROOT / "docs/reference/interface.md"
    assert page.read_text() == made, "run python docs/site/interface.py"
    assert "|  |" not in made, "a name has no docstring"


def test_every_public_name_has_a_topic():
    placed = [name for names in INTERFACE["OF_SEQPAR"].values() for name in names]
    assert sorted(placed) == sorted({*seqpar.__all__} - {"__version__"})


def not_public(tree):
    """The names of seqpar that a program uses, and that are not public."""
    public = {x: INTERFACE["names_of"](x) for x in ("seqpar", *INTERFACE["MODULES"])}
    for module in list(public):  # `seqpar.integrations` leads to a public module
        while "." in module:
            module, _, name = module.rpartition(".")
            public[module] = {*public.get(module, ()), name}
    modules, used = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for x in node.names:
                modules[x.asname or x.name.split(".")[0]] = (
                    x.name if x.asname else x.name.split(".")[0]
                )
                used.append(x.name.rpartition(".")[::2])
        elif isinstance(node, ast.ImportFrom):
            for x in node.names:
                modules[x.asname or x.name] = f"{node.module}.{x.name}"
                used.append((node.module, x.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(
            r"\w+(\.\w+)*", text := ast.unparse(node)
        ):
            root, *names = text.split(".")
            module = modules.get(root, "")
            while names and module in public:
                used.append((module, names[0]))
                module = f"{module}.{names.pop(0)}"
    return {
        f"{module}.{name}"
        for module, name in used
        if module.split(".")[0] == "seqpar" and name not in public.get(module, ())
    }


def test_guides_use_public_names_alone():
    for name in (x for x in NAMES if x.startswith(("docs/guides", "docs/strategies"))):
        blocks = re.findall(
            r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL
        )
        assert not not_public(ast.parse("\n".join(blocks))), name


def test_examples_use_public_names_alone():
    """But for the faults that the demo must notice, which are planted inside."""
    files = sorted((ROOT / "examples").glob("*.py"))
    found = [file.name for file in files if not_public(ast.parse(file.read_text()))]
    assert found == ["faults.py"]


def test_private_names_in_programs_are_found():
    program = (
        "import seqpar\nfrom seqpar import balance\nseqpar.layout.plot.x()\nbalance.y(balance.plan)"
    )
    assert not_public(ast.parse(program)) == {"seqpar.layout.plot.x", "seqpar.balance.y"}


def test_the_command_page_is_made_from_the_parsers():
    made = runpy.run_path(str(ROOT / "docs/site/command_line.py"))["page"]()
    page = ROOT / "docs/reference/command_line.md"
    assert page.read_text() == made, "run python docs/site/command_line.py"


def test_the_page_of_variables_has_all_of_ours():
    read = set()
    for folder in ("seqpar", "triton_kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            read |= set(re.findall(r'"(SEQPAR_[A-Z_]*[A-Z])"', file.read_text()))
    page = (ROOT / "docs/reference/environment.md").read_text()
    assert read and read == set(re.findall(r"`(SEQPAR_\w+)`", page))


def test_the_page_of_the_environment_has_all_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = table_of(ROOT / "docs/reference/environment.md", "| extra |")
    assert {first.strip("`") for first in rows} == set(project["optional-dependencies"])


def test_messages_that_pages_explain_are_in_the_sources():
    texts = []
    for file in (ROOT / "seqpar").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                texts.append("".join(x if isinstance(x, str) else "…" for x in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    errors = (ROOT / "docs/reference/errors.md").read_text()
    _, troubles = (ROOT / "docs/guides/huggingface.md").read_text().split("## Troubleshooting\n")
    troubles, _ = troubles.split("\n## ", 1)
    messages = re.findall(r"^\| `([^`]+)` \|", errors + troubles, re.MULTILINE)
    missing = [x for x in messages if not any(x in text for text in texts)]
    assert messages and not missing, missing
