"""A diffusion transformer within context_parallel: exact, or refused with the way out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqpar
from seqpar import Layout
from seqpar.comm.messages.comm import Comm
from tests.support.cases import STRATEGIES, module
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

DIM, HEADS, TEXT, PATCHES = 8, 2, 7, 16


def attention(q, k, v, **options):
    """F.scaled_dot_product_attention of (B, tokens, DIM)."""
    heads_first = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, **options)
    return out.transpose(1, 2).flatten(2)


class CrossBlock(nn.Module):
    """Modulated self-attention over the image, then cross attention to the text."""

    def __init__(self):
        super().__init__()
        self.modulation, self.qkv = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 3 * DIM)
        self.q, self.kv, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 8)

    def forward(self, x, time, text, mask=None):
        shift, scale = self.modulation(time)[:, None].chunk(2, -1)
        x = x + attention(*self.qkv(x * (1 + scale) + shift).chunk(3, -1))
        x = x + attention(self.q(x), *self.kv(text).chunk(2, -1), attn_mask=mask)
        return x + self.mlp(x).tanh()


class JointBlock(nn.Module):
    """Attention over text and image together, as in MMDiT; each has its own weights."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(DIM, 2 * DIM)
        self.of_text, self.of_image = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 3 * DIM)

    def forward(self, x, time, text):
        shift, scale = self.modulation(time)[:, None].chunk(2, -1)
        qkv = torch.cat([self.of_text(text), self.of_image(x * (1 + scale) + shift)], 1)
        out = attention(*qkv.chunk(3, -1))
        return x + out[:, text.shape[1] :], text + out[:, : text.shape[1]]


class DiT(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, DIM, 2, stride=2), nn.Linear(DIM, 12)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.refine = nn.Linear(DIM, 3 * DIM)  # causal self-attention of the text
        self.register_buffer("positions", torch.linspace(-1, 1, PATCHES)[:, None].expand(-1, DIM))
        self.double()
        own = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=own)

    def patchify(self, image):
        return self.patch(image).flatten(2).transpose(1, 2) + self.positions

    def run(self, x, time, text, mask=None):
        """Return the predictions of patches from their embeddings."""
        if isinstance(self.blocks[0], JointBlock):
            for block in self.blocks:
                x, text = block(x, time, text)
        else:
            text = text + attention(*self.refine(text).chunk(3, -1), is_causal=True)
            for block in self.blocks:
                x = block(x, time, text, mask)
        return self.head(x)

    def forward(self, image, time, text, mask=None):
        out = self.run(self.patchify(image), time, text, mask)
        return F.pixel_shuffle(out.transpose(1, 2).unflatten(2, (4, 4)), 2)


def inputs(masked=False):
    own = torch.Generator().manual_seed(1)
    sizes = (2, 3, 8, 8), (2, DIM), (2, TEXT, DIM)
    mask = torch.arange(TEXT) < torch.tensor([TEXT, 4])[:, None]  # padding of the second text
    drawn = [torch.randn(size, dtype=torch.float64, generator=own) for size in sizes]
    return [*drawn, *([mask[:, None, None]] if masked else [])]


def on_one_device(block, masked=False):
    model = DiT(block)
    image, *others = inputs(masked)
    out = model.run(model.patchify(image), *others)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


def differences(answers, block, layout, masked=False):
    out, grads = on_one_device(block, masked)
    worst = [relative(own, layout.shard(out, rank, dim=1)) for rank, (own, _) in enumerate(answers)]
    sums = [sum(of_ranks) for of_ranks in zip(*(own for _, own in answers), strict=True)]
    worst += [relative(x, y) for x, y in zip(sums, grads, strict=True)]
    return max(worst)


def crossed(comm, strategy, layout, masked):
    model, attn = DiT(CrossBlock), module(strategy, comm)
    image, *others = inputs(masked)
    x = layout.shard(model.patchify(image), attn.rank, dim=1)
    with seqpar.context_parallel(None, layout, attn, replicated_keys=[TEXT]):
        out = model.run(x, *others)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters()]


@few_rows()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_with_cross_attention_are_exact(strategy, masked):
    layout = Layout.zigzag(PATCHES, 2)
    answers = virtual(2, crossed, strategy, layout, masked)
    assert differences(answers, CrossBlock, layout, masked) <= 1e-12


def joined(ranks):
    """The layouts of text, of image, and of both in a row."""
    text, image = Layout.contiguous(TEXT, ranks), Layout.zigzag(PATCHES, ranks)
    spans = [
        [
            *text.spans(rank),
            *((0, TEXT + start, TEXT + stop) for _, start, stop in image.spans(rank)),
        ]
        for rank in range(ranks)
    ]
    return text, image, Layout.from_spans(spans, TEXT + PATCHES)


def jointly(comm, strategy, layouts):
    model, attn = DiT(JointBlock), module(strategy, comm)
    of_text, of_image, both = layouts
    image, time, text = inputs()
    x = of_image.shard(model.patchify(image), attn.rank, dim=1)
    with seqpar.context_parallel(None, both, attn):
        out = model.run(x, time, of_text.shard(text, attn.rank, dim=1))
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@few_rows()
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "token_ring"])
def test_joint_attention_is_exact_on_both_layouts(strategy, ranks):
    layouts = joined(ranks)
    answers = virtual(ranks, jointly, strategy, layouts)
    assert differences(answers, JointBlock, layouts[1]) <= 1e-12


LAYOUT = Layout.zigzag(PATCHES, 2)


def whole(model):
    return model(*inputs())


def on_image_layout(model):
    image, time, text = inputs()
    return model.run(LAYOUT.shard(model.patchify(image), 0, dim=1), time, text)


def crossing(model):
    image, time, text = inputs()
    return model.blocks[0](LAYOUT.shard(model.patchify(image), 0, dim=1), time, text)


REFUSED = [
    (CrossBlock, whole, [TEXT], r"^query must be .*: the batch is whole: put it among the buffers"),
    (JointBlock, whole, [], r"^query must be .* for joint attention over text and image, shard"),
    (JointBlock, on_image_layout, [], r"^query must be .* made by Layout.from_spans"),
    (CrossBlock, crossing, [], r"^key must be .* takes replicated_keys=\[7\]"),
    (CrossBlock, crossing, [5], r"^key must be .* takes replicated_keys=\[7\]"),
]


@pytest.mark.parametrize(("block", "call", "replicated", "message"), REFUSED)
def test_errors_say_what_to_do(block, call, replicated, message):
    def refused(comm):
        with (
            pytest.raises(ValueError, match=message),
            seqpar.context_parallel(comm, LAYOUT, replicated_keys=replicated),
        ):
            call(DiT(block))
        return True

    assert virtual(2, refused) == [True, True]


Q, KV = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, TEXT, 4)
CALLS = [
    ({"is_causal": True}, "is_causal must be False for replicated_keys"),
    ({"dropout_p": 0.1}, "dropout_p must be 0"),
    ({"attn_mask": torch.zeros(8, TEXT)}, r"attn_mask must be of shape \(..., 1, keys\)"),
    ({"query": torch.zeros(1, 2, 9, 4)}, "query must be .* with this rank's tokens"),
]


@pytest.mark.parametrize(("changes", "message"), CALLS)
def test_calls_with_replicated_keys_are_checked(changes, message):
    arguments = {"query": Q, "key": KV, "value": KV} | changes
    with (
        seqpar.context_parallel(Comm("alone", 0, 2), LAYOUT, replicated_keys=(TEXT,)),
        pytest.raises(ValueError, match=message),
    ):
        F.scaled_dot_product_attention(**arguments)


def test_masks_of_all_queries_alike_are_taken():
    mask = torch.tensor([True] * 4 + [False] * 3)
    with seqpar.context_parallel(Comm("alone", 0, 2), LAYOUT, replicated_keys={TEXT}):
        for shape in ((1, TEXT), (1, 1, 1, TEXT)):
            F.scaled_dot_product_attention(Q, KV, KV, mask.view(shape))
        F.scaled_dot_product_attention(Q, KV, KV, mask.expand(1, 1, 8, TEXT))


WRONG = [
    (7, "replicated_keys must be a list"),
    ("7", "replicated_keys must be a list"),
    ([0], "replicated_keys must be"),
    ([7.5], "replicated_keys must be an integer"),
    ([True], "replicated_keys must be an integer"),
    (
        [TEXT, 8],
        "replicated_keys must not contain 8, because rank 0 holds 8 of the layout's tokens",
    ),
]


@pytest.mark.parametrize(("numbers", "message"), WRONG)
def test_wrong_numbers_of_keys_are_refused(numbers, message):
    context = seqpar.context_parallel(Comm("alone", 0, 2), LAYOUT, replicated_keys=numbers)
    with pytest.raises(ValueError, match=message), context:
        pass


def test_bits_of_ranks_exclude_replicated_keys():
    attn = seqpar.make_attention("ring", Comm("alone", 0, 2), deterministic="ranks")
    context = seqpar.context_parallel(None, LAYOUT, attn, replicated_keys=[TEXT])
    with pytest.raises(ValueError, match="replicated_keys must be empty"), context:
        pass
