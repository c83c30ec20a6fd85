"""The explorer shows what the strategy's code does, and an address is all that it takes."""

import contextlib
import http.client
import re
import socket
import threading
import xml.etree.ElementTree as ET
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch

from seqpar.comm.messages.comm import Comm
from seqpar.commands.explore import MEANINGS
from seqpar.explore.page import page
from seqpar.explore.page_server import answered, listening
from seqpar.explore.question import Question, answer
from seqpar.simulate.candidates import STRATEGIES

SMALL = {"lengths": "100,28x2", "heads": 4, "kv_heads": 4, "head_dim": 8}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_that_the_module_counts(strategy):
    question = Question(strategy=strategy, **SMALL)
    found = answer(question)
    for rank in range(4):
        comm = Comm("none", rank, 4)
        attn = question.candidate().make(comm)
        tokens = found.layout.tokens_on(rank)
        q, k, v = torch.empty(3, tokens, 4, 8, device="meta", dtype=torch.bfloat16)
        sent = np.zeros(4, dtype=np.int64)
        for row in attn.traffic(q, k, v, found.layout, causal=True):
            sent[row.peer] += row.bytes
        assert found.bytes[rank].tolist() == sent.tolist()
    assert found.bytes.sum(1).tolist() == found.outcome.sent_bytes.tolist()


def test_work_is_the_masks_area():
    found = answer(Question(**SMALL))
    visible = sum(n * (n + 1) // 2 for n in (100, 28, 28))
    assert found.work.sum() == 4 * visible


def test_an_address_asks_all_that_differs():
    question = Question(strategy="usp", window=7, causal="no", lengths="5,6x2", ranks=8)
    assert Question.of(dict(parse_qsl(question.address()))) == question
    assert Question().address() == ""
    assert question.documents() == [5, 6, 6] and Question(lengths="1Kx2").documents() == [1024] * 2
    assert set(MEANINGS) == set(Question.__dataclass_fields__)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("ranks=0", "ranks"),
        ("ranks=65", "ranks"),
        ("ranks=four", "ranks"),
        ("ranks=64&lengths=64x2", "ranks and lengths"),
        ("lengths=", "lengths"),
        ("lengths=-4", "lengths"),
        ("lengths=1x9999999999", "lengths"),
        ("lengths=99999999999", "lengths"),
        ("lengths=4x", "lengths"),
        ("strategy=__class__", "strategy"),
        ("layout=from_spans", "layout"),
        ("cluster=/etc/passwd", "cluster"),
        ("ranks=16&cluster=1x8-h100", "cluster"),
        ("cluster=9999999999x8-h100", "cluster"),
        ("lengths=%C2%B2", "lengths"),
        ("heads=5", "heads"),
        ("strategy=usp&mesh=3", "mesh"),
        ("dtype=int8", "dtype"),
        ("colour=red", "fields"),
    ],
)
def test_wrong_questions_are_refused_by_name(query, named):
    status, text = answered(query)
    assert status == 400 and f"<h2>Refused</h2>{named}" in text


def test_a_page_shows_a_command_for_the_shell():
    assert "--lengths &#x27;64 32&#x27;" in page(answer(Question(lengths="64 32")), {})


def test_dtypes_have_the_names_of_bench_and_of_torch():
    for name in ("fp32", "float32"):
        status, text = answered(f"lengths=64&ranks=2&dtype={name}")
        assert status == 200 and "<option selected>fp32" in text and "--dtype fp32" in text


def test_what_is_asked_is_escaped():
    _, text = answered("lengths=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script" not in text


@pytest.mark.parametrize("changes", [{}, {"ranks": 1}, {"lengths": "3", "layout": "contiguous"}])
def test_a_page_is_one_file_of_whole_pictures(changes):
    text = page(answer(Question(**SMALL | changes)), {})
    assert not any(x in text for x in ("<script", "<link", "src=", "@import", "url("))
    pictures = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(pictures) == 4
    for picture in pictures:
        ET.fromstring(picture)


@pytest.mark.parametrize("ranks", [4, 16])
def test_words_fit_into_their_picture_on_a_phone(ranks):
    """There, a picture is as wide as the page, and its words are larger in it."""
    found = page(answer(Question(**SMALL | {"ranks": ranks, "strategy": "all_gather"})), {})
    assert "min-width" not in found and "overflow-x" not in found
    style = found.split("@media (max-width: 39rem)")[1].split("</style>")[0]
    sizes = {
        kind: int(n) for kind, n in re.findall(r"svg text(.*?) { font-size: (\d+)px; }", style)
    }
    for picture in re.findall(r"<svg.*?</svg>", found, re.DOTALL):
        root = ET.fromstring(picture)
        width = float(root.get("viewBox").split()[2])
        for word in root.iter("{http://www.w3.org/2000/svg}text"):
            kinds, x = word.get("class", "").split(), float(word.get("x"))
            if "tight" in kinds:
                assert "svg .tight { display: none; }" in style
                continue
            size = sizes[".number" if "number" in kinds else ""]
            length = 0.6 * size * len(word.text)
            left = x - length * (1.0 if "end" in kinds else 0.5 if "middle" in kinds else 0.0)
            assert left >= -2 and left + length <= width + 2 and float(word.get("y")) >= 0.7 * size


def test_the_server_answers_at_its_own_address_alone():
    with listening(0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        idle = socket.create_connection(server.server_address)  # as browsers have some to spare
        try:
            statuses = []
            for path in ("/?lengths=64&ranks=2", "/etc/passwd", "/?ranks=x"):
                link = http.client.HTTPConnection("127.0.0.1", server.server_port)
                with contextlib.closing(link):
                    link.request("GET", path)
                    answer = link.getresponse()
                    statuses.append(answer.status)
                    assert (b"<svg" in answer.read()) == (answer.status == 200)
            link = http.client.HTTPConnection("127.0.0.1", server.server_port)
            with contextlib.closing(link):
                link.request("GET", "/?lengths=64", headers={"Sec-Fetch-Site": "cross-site"})
                statuses.append(link.getresponse().status)
        finally:
            idle.close()
            server.shutdown()
            thread.join()
    assert statuses == [200, 404, 400, 403]


def test_the_command_writes_a_page(tmp_path, capsys):
    from seqpar.__main__ import main

    path = tmp_path / "page.html"
    arguments = ["explore", "--lengths", "64x2", "--ranks", "2", "--html"]
    assert main([*arguments, str(path)]) == 0
    assert "<svg" in path.read_text() and str(path) in capsys.readouterr().out
    assert main([*arguments, str(tmp_path / "no/page.html")]) == 2
    assert "html" in capsys.readouterr().err
