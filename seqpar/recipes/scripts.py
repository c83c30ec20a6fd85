"""Write a recipe as a training script. The script's docstring has the command and the
predictions.
"""

from __future__ import annotations

from importlib.resources import files
from string import Template

from seqpar.recipes.recipe import CHUNK, LOSS_CHUNK, Recipe

# Trainer -> the expression for the type of devices in the trainer's template.
DEVICES = {"plain": "device.type", "trl": "given.device.type"}


def script(recipe: Recipe, trainer: str) -> str:
    """Return the text of a script that trains with transformers alone ("plain") or TRL ("trl")."""
    cluster = recipe.costs.cluster
    template = Template(files("seqpar.recipes").joinpath(f"{trainer}_script.txt").read_text())
    return template.substitute(
        repository=recipe.published.repository,
        tokens=f"{recipe.tokens:,}",
        token_count=f"{recipe.tokens:_}",
        gpus=f"{cluster.ranks} {cluster.device.name}",
        command=command(recipe),
        predictions=predictions(recipe),
        chunk=CHUNK,
        loss_chunk=LOSS_CHUNK,
        offload=recipe.keeping.offload,
        keep_attention=recipe.keeping.attention,
        peak=f"{cluster.device.matmul_rate:.4g}".replace("e+", "e"),
        group=_group(recipe, DEVICES[trainer]),
        strategy=recipe.strategy,
        layout=recipe.layout,
    )


def command(recipe: Recipe) -> str:
    """Return the command that starts the script on each node."""
    cluster = recipe.costs.cluster
    nodes = ""
    if cluster.nodes > 1:
        nodes = f"--nnodes {cluster.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    return f"torchrun {nodes}--nproc-per-node {cluster.devices_per_node} train.py --text FILE"


def _group(recipe: Recipe, device: str) -> str:
    """Return lines that make the group of all ranks or, for USP, a mesh whose rows are nodes."""
    if recipe.strategy != "usp":
        return "group = dist.group.WORLD"
    in_node = recipe.costs.cluster.devices_per_node
    return (
        f"in_node = min({in_node}, dist.get_world_size())\n"
        f"    shape = (dist.get_world_size() // in_node, in_node)\n"
        f"    group = dist.init_device_mesh({device}, shape)"
    )


def predictions(recipe: Recipe) -> str:
    """Return the predicted seconds and memory by part, as lines of text."""
    memory = recipe.memory
    lines = [
        f"Predicted seconds of a step: {recipe.step_seconds:.1f} ± {recipe.error:.0%}, "
        f"MFU {recipe.mfu:.0%}",
        *(f"  {name:32}{x:9.1f}" for name, x in recipe.seconds.items()),
        f"Predicted GB on the fullest GPU: {memory.total / 1e9:.1f}, while backward computes "
        f"the {memory.moment}",
        *(f"  {name:32}{x / 1e9:9.2f}" for name, x in memory.parts.items()),
    ]
    return "\n".join(lines)
