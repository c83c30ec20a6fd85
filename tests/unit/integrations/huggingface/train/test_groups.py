"""The batches that a Trainer's groups of ranks read, against those of transformers' Trainer."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from seqpar.integrations.huggingface.train.groups import Groups
from tests.support import huggingface as hf
from tests.support.tiers import few_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


# With these numbers of samples and of rows in a batch, the last turn of the groups is full, ends
# within the rows of a group, or ends between two groups.
COUNTS, ROWS = (1, 2, 3, 5, 7, 10, 12), (1, 2, 3)
OPTIONS = {
    "as they are": {},
    "drop_last": {"dataloader_drop_last": True},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "in order": {"train_sampling_strategy": "sequential"},
    "seeds of torch": {"accelerator_config": {"use_seedable_sampler": False}},
    "split": {"accelerator_config": {"split_batches": True}},
    "uneven": {"accelerator_config": {"even_batches": False}},
}


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(samples(self.count))


class SizedStream(Stream):
    def __len__(self):
        return self.count


class WorkersStream(Stream):
    def __iter__(self):
        worker = get_worker_info()
        return iter(samples(self.count)[worker.id :: worker.num_workers])


def samples(count):
    return [{"input_ids": [i] * (1 + i % 3)} for i in range(count)]


DATASETS = {"mapped": samples, "stream": Stream, "sized stream": SizedStream}


def collate(features):
    """A batch of rows that name their samples."""
    return {"input_ids": torch.tensor([x["input_ids"][0] for x in features])[:, None]}


@pytest.fixture(scope="module")
def model():
    return hf.tiny("LlamaForCausalLM")


def make_trainer(model, folder, rows, options):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, data_collator=collate)
    trainer.processing_class = None
    return trainer


def epochs(loader):
    """(batches of two epochs, length, whether each batch is the last)."""
    found = []
    state = accelerate.state.GradientState()
    for _ in range(2):
        epoch = []
        for batch in loader:
            epoch.append((batch["input_ids"][:, 0].tolist(), state.end_of_dataloader))
        found.append(epoch)
    return found, len(loader) if transformers.trainer_utils.has_length(loader) else None


def of_training(trainer, dataset):
    trainer.train_dataset = dataset
    transformers.set_seed(5)
    return epochs(trainer.get_train_dataloader())


@few_rows()
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_group_trains_on_the_batches_of_one_process(model, tmp_path, kind, options):
    for rows in ROWS:
        expected = make_trainer(model, str(tmp_path), rows, OPTIONS[options])
        trainer = make_trainer(model, str(tmp_path), rows, OPTIONS[options])
        Groups(trainer.accelerator, [0], 0)
        for count in COUNTS:
            dataset = DATASETS[kind](count)
            assert of_training(trainer, dataset) == of_training(expected, dataset), (count, rows)


@few_rows()
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_groups_train_on_the_batches_of_processes(model, tmp_path, options, groups):
    """Those of accelerate, told how many processes there are; it deals samples to them."""
    for rows in ROWS:
        if options == "split" and rows % groups:
            continue
        trainers = [make_trainer(model, str(tmp_path), rows, OPTIONS[options]) for _ in range(2)]
        trainer, expected = trainers
        for index, count in itertools.product(range(groups), COUNTS):
            Groups(trainer.accelerator, list(range(groups)), index)
            accelerator = expected.accelerator

            def prepare(loader, accelerator=accelerator, index=index, **_):
                return accelerate.data_loader.prepare_data_loader(
                    loader,
                    num_processes=groups,
                    process_index=index,
                    split_batches=accelerator.split_batches,
                    even_batches=accelerator.even_batches,
                    use_seedable_sampler=accelerator.use_seedable_sampler,
                    rng_types=["generator"],
                )

            accelerator.prepare_data_loader = prepare
            dataset = samples(count)
            assert of_training(trainer, dataset) == of_training(expected, dataset), (count, rows)


def of_accelerate(dataset, split, groups, index, **options):
    """The batches that accelerate makes in its first process, and would send to this one."""
    calls = itertools.count()

    def part_of(batch, part, **_):
        fills = not next(calls) and not options["drop_last"]  # what fills the last batch is first
        start = 0 if fills else index * part.stop
        return accelerate.utils.slice_tensors(batch, slice(start, start + part.stop))

    dispatcher = accelerate.data_loader.DataLoaderDispatcher(
        dataset, split, slice_fn=part_of, _drop_last=options["drop_last"], **options
    )
    dispatcher.state = SimpleNamespace(process_index=0, num_processes=groups, device="cpu")
    batches = [x["input_ids"][:, 0].tolist() for x in dispatcher]
    return [x for x in batches if x]  # a turn of fewer samples than groups makes empty ones


@pytest.mark.parametrize("kind", ["as they are", "drop_last", "split"])
@pytest.mark.parametrize(
    ("count", "rows", "workers"),
    [
        (21, 2, 2),
        pytest.param(37, 4, 4, marks=pytest.mark.exhaustive),  # a turn that cannot be divided
    ],
)
def test_groups_divide_what_several_workers_read(model, tmp_path, kind, count, rows, workers):
    """As accelerate does, also where training resumes."""
    dataset, split = WorkersStream(count), kind == "split"
    options = {"batch_size": rows * (1 + split), "drop_last": kind == "drop_last"}
    options |= {"num_workers": workers, "collate_fn": collate}
    for index in range(2):
        expected = of_accelerate(dataset, split, 2, index, **options)
        accelerator = make_trainer(model, str(tmp_path), 2, OPTIONS[kind]).accelerator
        Groups(accelerator, [0, 1], index)
        loader = accelerator.prepare(DataLoader(dataset, **options))
        found, _ = epochs(loader)
        ends = [False] * (len(expected) - 1) + [True]
        assert found == [list(zip(expected, ends, strict=True))] * 2
        resumed = accelerate.skip_first_batches(loader, 3)
        assert [x["input_ids"][:, 0].tolist() for x in resumed] == expected[3:]


@pytest.mark.parametrize("streams", [True, False])
def test_groups_share_worker_seeds_only_for_streams(model, tmp_path, streams):
    """Groups divide the samples of a stream, so their workers must draw the same ones."""
    accelerator = make_trainer(model, str(tmp_path), 2, {}).accelerator
    Groups(accelerator, [0, 1], 1)
    seed = partial(transformers.trainer_utils.seed_worker, num_workers=2, rank=0)
    dataset = WorkersStream(17) if streams else [{"input_ids": [i]} for i in range(17)]
    loader = DataLoader(dataset, num_workers=2, collate_fn=collate, worker_init_fn=seed)
    base = accelerator.prepare(loader).base_dataloader
    workers = base.dataset._workers if streams else base
    assert workers.worker_init_fn.keywords["rank"] == (0 if streams else 1)


def gathered(batch, gather, rows):
    """What becomes of a batch's rows and of its loss, which stands for each of them."""
    ids = batch["input_ids"]
    losses = ids.float().mean().repeat(rows)
    return gather(ids)[:, 0].tolist(), gather(losses).tolist()


@few_rows()
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count_of_groups", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_groups_evaluate_batches_of_one_process(model, tmp_path, kind, options, count_of_groups):
    """Their rows and their weights in the mean loss, in the order of one process."""
    state = accelerate.state.GradientState()
    for rows in ROWS:
        alone = make_trainer(model, str(tmp_path), rows, OPTIONS[options])
        trainers = [
            make_trainer(model, str(tmp_path), rows, OPTIONS[options])
            for _ in range(count_of_groups)
        ]
        for count in COUNTS:
            dataset = DATASETS[kind](count)
            loader = alone.get_eval_dataloader(dataset)
            gather = alone.accelerator.gather_for_metrics
            expected = [gathered(batch, gather, rows) for batch in loader]
            steps = []
            for index, trainer in enumerate(trainers):
                groups = Groups(trainer.accelerator, list(range(count_of_groups)), index)
                groups.gather = lambda x: x  # of other groups
                with groups.evaluating():
                    loader = trainer.get_eval_dataloader(dataset)
                steps.append(
                    [
                        gathered(batch, groups.gather_for_metrics, rows)
                        for batch in loader
                        if index in groups._counted
                    ]
                )
            dealt = [x for turn in itertools.zip_longest(*steps) for x in turn if x is not None]
            assert dealt == expected, (count, rows)
    assert state.active_dataloader is None
