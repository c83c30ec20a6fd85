"""Notes on each paper: how its setting is predicted, assumptions, and reasons for differences.

The numbers in them belong to the committed results. Check them when the results change.
"""

from __future__ import annotations

# By paper: (kind, note), in the order of the page.
NOTES: dict[str, tuple[tuple[str, str], ...]] = {
    "ulysses": (
        ("setting", "GPT of 30B on 64 A100 of 40 GB, and of 7B on 32."),
        ("ours", "Ulysses on the fewest ranks that hold a sequence, ZeRO-3, full checkpointing."),
        ("baseline", "Megatron-LM shards weights and heads (`megatron.py`)."),
        ("rates", "They count recomputation, and in attention only the pairs that attend."),
        ("assumed", "30B: 64 layers of 6,144 with 64 heads. 7B: 32 layers of 4,096 with 32 heads."),
        ("assumed", "Computation hides ZeRO-3's gathering."),
        ("assumed", "Bars were read from pictures, to within 1 or 2 TFLOP/s."),
        ("volume", "A rank keeps 1/P of the 4Nh/P that it exchanges; the paper leaves that out."),
        (
            "rates",
            "Our kernel has one rate at all lengths. Their attention was slower than linear "
            "modules, so their rate falls with attention's share.",
        ),
        ("30B, 8K", "Bars show a ratio of 3.7, the text 2.5."),
        (
            "30B, baseline",
            "The bars fit 64 GPUs that share weights across nodes with an unsharded "
            "optimizer. A node's 40 GB GPUs cannot hold 30B that way. With a sharded "
            "optimizer inside nodes it loses little, as their 7B bars confirm.",
        ),
        (
            "longest",
            "On 64 GPUs with full checkpointing, memory ends after 512K for Megatron-LM "
            "and 1024K for Ulysses. Theirs ended after 64K and 256K: their Megatron-LM "
            "kept more than the inputs of layers.",
        ),
    ),
    "ring_flash_attention": (
        (
            "setting",
            "8 GPUs of a node, 32 query heads, 8 KV heads, D = 128, 8K tokens per GPU, causal.",
        ),
        ("percent", "Of the speed of FlashAttention on one GPU with an eighth of the work."),
        (
            "predicted",
            "Our ring on each layout, plus their merges of results in fp32 after each "
            "round, by torch's operators.",
        ),
        ("ours", "Without those merges, because our kernel continues a partial result."),
        ("baseline", "The contiguous ring waits for its last rank; zigzag is the fair baseline."),
        ("assumed", "Stripes have 128 tokens. Theirs have one, masked tile by tile."),
        ("assumed", "Merges take their bytes over the memory bandwidth; launches take no time."),
        (
            "percents",
            "Mean error +6% on one document, +13% on packed ones. Not included are the "
            "host between a message and a kernel, and the kernel that flattens the lse of "
            "packed documents.",
        ),
        (
            "one kernel",
            "Its speed comes from other papers, on the A100 the middle of a range. "
            "Theirs is faster; percents depend little on it.",
        ),
    ),
    "token_ring": (
        ("setting", "Four A10 on PCIe, 32 heads, D = 128, 24,000 tokens, causal, forward only."),
        (
            "ours",
            "Our code with partials in bf16, as theirs. A step lasts from one computation of "
            "a rank to the next.",
        ),
        (
            "assumed",
            "The link's 12.9 GB/s in each direction is fitted to Ring's round. PCIe 4.0 "
            "allows much more, and no other figure gives the rate.",
        ),
        ("assumed", "An A10's attention reaches the share of its peak that an A100's does."),
        (
            "kernel",
            "A step has 0.29 TFLOP. Ours takes 4.6 ms (64 TFLOP/s), theirs at most 3.5 ms "
            "(84 TFLOP/s, 67% of the peak).",
        ),
        (
            "step 2",
            "Queries and results leave a device together and share its port here. Theirs "
            "differ less, as if each neighbour had its own path.",
        ),
    ),
    "mesh": (
        (
            "setting",
            "Nodes of 8 H100, 32 heads, D = 128, causal, forward and backward, zigzag, "
            "compared with Ring.",
        ),
        (
            "ours",
            "Our code, on the mesh that sends least. From 256 GPUs on, bytes follow a formula "
            "that tests compare with sent bytes.",
        ),
        (
            "assumed",
            "The abstract does not name the GPUs and lengths of the average. Ours covers "
            "64 GPUs with 64K, 128K and 256K tokens, and 128 GPUs with 256K.",
        ),
        (
            "gain",
            "It depends on the lengths: with more tokens per rank, computation hides more of "
            "Ring's messages.",
        ),
        (
            "bytes",
            "Here partials, dq and the gradients of keys travel in fp32, for Ring too. Ring "
            "sends keys directly, and only those that queries attend to: under a causal mask "
            "a quarter less than when keys pass from rank to rank.",
        ),
    ),
    "usp": (
        ("setting", "Two nodes of 8 A800, Llama 3 8B, one sequence of 208K tokens."),
        (
            "ours",
            "USP with heads inside nodes and a ring between them, zigzag, checkpointing "
            "'attention' (the least that fits).",
        ),
        ("MFU", "It does not count recomputed FLOPs."),
        ("assumed", "NICs as in Zeppelin's A800 nodes: 4 of 200 Gbit/s."),
        (
            "86% and 47%",
            "The same step, counted with all pairs (an earlier version of the paper) "
            "or with the pairs that attend (the last version).",
        ),
    ),
    "lightseq": (
        (
            "setting",
            "Llama 7B, also with 8 KV heads and with 33 heads, on one and two nodes of 8 "
            "A100, 4K to 32K tokens per GPU.",
        ),
        ("ours", "LightSeq is our zigzag Ring with checkpointing 'attention'."),
        (
            "baselines",
            "Megatron-LM, Ring Attention and Ulysses recompute whole layers. Megatron-LM "
            "and Ulysses pad 33 heads to a multiple of the ranks, their main handicap.",
        ),
        ("assumed", "Ring Attention is our Ring on contiguous chunks."),
        (
            "slower cells",
            "In 3 of 24 cells it is slower than Megatron-LM: two nodes, equal numbers "
            "of query and KV heads, and sequences too short to hide the keys between "
            "nodes. In all others it is at least 1.05 times as fast.",
        ),
        ("baseline", "Our Megatron-LM uses all NICs and waits for nothing else; theirs may not."),
        ("ranges", "The paper gives the range of all cells, not the cell of each figure."),
    ),
    "lasp2": (
        ("setting", "Linear-Llama3-1B on 64 A100, one sequence on all GPUs."),
        (
            "ours",
            "Our LASP-2 with its all-gather in virtual time. LASP-1 and Ring follow the cost "
            "model (`linear_cost.py`) that the measured runs above validate.",
        ),
        (
            "baselines",
            "All have the right product and the same kernels, so they are fair. Theirs "
            "lacked the right product.",
        ),
        (
            "assumed",
            "A constant of 1.51 s per step (gradients, optimizer, launches) is fitted to "
            "2K, where GPUs compute almost nothing.",
        ),
        (
            "assumed",
            "At 2K, ranks wait 84 ms for states, whose size does not depend on the length.",
        ),
        (
            "growth",
            "Published steps grow by 0.33 s from 2K to 64K, where ranks compute little: a "
            "cost of the framework outside the constant.",
        ),
        (
            "over LASP-1",
            "Our all-gather sends a state to each GPU of a node. NCCL and LASP-1's "
            "hops send it to a node once. The difference is the time of those messages.",
        ),
        (
            "2048K, LASP-1",
            "The published difference is 255 µs per hop, the model's hop 21 µs. States "
            "have one size but the difference grows, as if their LASP-1 worked on "
            "tokens between hops.",
        ),
        (
            "2048K, Ring",
            "63 hops of keys, values, q and dout are 541 GB. In the whole step of 4.6 s "
            "a link between nodes carries 104 GB at the assumed rate. They had fewer KV "
            "heads, or fewer ranks in a ring.",
        ),
    ),
    "gated_delta": (
        (
            "setting",
            "Gated DeltaNet, one document of 32K tokens on four H800, 64 heads of D = 128, "
            "bf16, compared with an exchange of heads.",
        ),
        (
            "ours",
            "One device takes the published 4.808 ms forward and 15.560 ms with backward. A "
            "rank takes its share, times the FLOPs of our code there over one device's.",
        ),
        (
            "assumed",
            "A device sends 130 GB/s over NVLink in each direction, 65% of nominal, and a "
            "message takes 10 µs in addition, as elsewhere on this page.",
        ),
        (
            "assumed",
            "All FLOPs take equally long. An exchange of heads hides nothing, and copies "
            "of its messages take no time.",
        ),
        (
            "maps",
            "Messages take 0.17 ms per pass, mostly hidden. Maps cost more: 1.80 times the "
            "FLOPs forward and 1.28 times backward. Theirs have special kernels.",
        ),
        (
            'backend "fla"',
            "It calls only public functions of fla-core, which return a final state "
            "but no map. A rank in the middle of a document computes the map as K more "
            "columns of values, which count as a second call. Its product with the entering "
            "state is not counted. That is faster than an exchange of heads.",
        ),
    ),
    "distca": (
        (
            "setting",
            "64 to 512 H200 in units of 8 with tensor parallelism, contexts of 128K to "
            "512K, lengths of Pretrain and ProLong.",
        ),
        ("ours", "Steps are predicted by `benchmarks.balance.simulated_steps`."),
        (
            "baseline",
            "WLB-LLM without deferring documents, with the best size of context parallel "
            "groups by predicted time.",
        ),
        ("assumed", "Documents are drawn 3 times per cell, from quantiles in its repository."),
        (
            "assumed",
            "Neither system recomputes anything, and the reduction of gradients is hidden.",
        ),
        (
            "no pipeline",
            "Our WLB-LLM is better than theirs: a larger group shares a document that "
            "ranks would wait for. The same costs give the group's speed. Without "
            "groups it idles about as published on 8 replicas, and more on 4.",
        ),
        (
            "its rule",
            "It bounds a server's deficit but not its excess. On even batches its slowest "
            "server makes it slower than WLB-LLM. Our rule bounds both.",
        ),
    ),
    "zeppelin": (
        (
            "setting",
            "Nodes of A800, H800 and H200, LLaMA 3B to 30B, 16 to 128 GPUs, 4K tokens per GPU.",
        ),
        ("ours", "Costs of plans (`seqpar.balance`)."),
        (
            "baseline",
            "Transformer Engine's even split: the keys of all documents go around a ring "
            "of all ranks, between nodes over one NIC each.",
        ),
        (
            "assumed",
            "Its ArXiv lengths are not public. Batches of ProLong and GitHub whose longest "
            "document is the batch stand for them.",
        ),
        (
            "assumed",
            "The even split has no launches, merges or memory for padding, which favours it.",
        ),
        (
            "a round",
            "The published round takes 5.3 times as long over one NIC as over four, more "
            "than four NICs explain. 0.411 ms fits no model of its table at a NIC's rate. "
            "Ours is 7B.",
        ),
        (
            "fair baseline",
            "The even split waits mainly for its one NIC. Over an even split routed "
            "over all NICs, plans are 2.94 times as fast on average.",
        ),
        ("remapping", "It gains little here, because messages limit a plan by Zeppelin's rule."),
    ),
    "bytescale": (
        ("setting", "1,024 H800, contexts of 2M tokens."),
        (
            "ours",
            'Costs of plans (`seqpar.balance`). "At most" shares all work evenly and sends '
            "nothing.",
        ),
        (
            "baseline",
            "Static DP × CP packs documents in order and cuts each pack over a group of 128 ranks.",
        ),
        (
            "assumed",
            "1,024 GPUs, 16K tokens per rank, batches of 32M tokens. GitHub's lengths "
            "resemble ByteScale's own where none were published.",
        ),
        ("assumed", "The model is unknown: 7B has 32 KV heads, 8B has 8."),
        (
            "8B",
            "Its keys are a quarter, so the baseline loses less than published and no plan "
            'gains as much: see the rows "at most".',
        ),
        (
            "7B",
            "A ring sends every key to every rank of a document, which takes longer than all "
            "work. With heads shared inside nodes, an eighth travels between them.",
        ),
        (
            "steps",
            "The ranks of the longest document never wait in one batch. Fewer ranks per "
            "document gain nothing before balancing; only the product of both steps is "
            "comparable.",
        ),
    ),
    "dynamic_cp": (
        ("setting", "Llama 13B, lengths of GitHub, a pipeline of 8 stages of 4 × 8 H100."),
        (
            "baseline",
            "Packing fills sequences of the context in order and cuts each document over "
            "a group of 8 ranks.",
        ),
        (
            "ours",
            "A group has the number of ranks that a document needs, a power of two "
            '(`balance.plan(method="power_of_two")`).',
        ),
        (
            "assumed",
            "The introduction gives only 1.48. Pipeline, number of GPUs, packing degree "
            "and contexts are assumed.",
        ),
        (
            "assumed",
            "Plans have room for 25% more tokens than there are, so that they have a "
            "choice. Packing has none and fills its sequences.",
        ),
        (
            "contexts",
            "Longer contexts have less even sequences, so a plan gains more. In short "
            "ones groups cut documents that would fit whole: at 64K they are 0.82 times "
            "as fast as packing.",
        ),
    ),
    "fcp": (
        (
            "setting",
            "64 H100, Qwen3 8B, contexts of 128K; lengths of GitHub, ByteScale's own data, "
            "Llama 3's fine-tuning and MagiAttention's.",
        ),
        ("baseline", "Static DP × CP with groups of 8 for the longest document."),
        ("ours", 'Groups of any number of ranks (`balance.plan(method="bytescale")`).'),
        (
            "assumed",
            "The abstract gives only the two figures. GPUs, model, context and lengths are "
            "assumed. Plans have room for 25% more tokens than there are.",
        ),
        (
            "gain",
            "With these lengths, even work without messages would be 1.92 times as fast as "
            "the baseline for the most uneven batch: theirs was more uneven.",
        ),
        ("refinement", "Ours are refined plans; groups alone take 32% longer than that bound."),
    ),
}
