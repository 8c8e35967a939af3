"""What users and Lightning ask of a training loader finds what a DataLoader has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.distributed.harness import run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer


def look(rank: int, world_size: int) -> list[Any]:
    data, found = RandomTokens(24), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_connector, "suggested_max_num_workers", lambda _: 8)
        for options in ({"shuffle": True}, {"sampler": WeightedRandomSampler([1.0] * 24, 24)}):
            trainer = make_trainer(rank, world_size, max_steps=1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.fit(OwnModule(), DataLoader(data, batch_size=6, **options), DataLoader(data, batch_size=6))  # type: ignore[arg-type]
            loader = trainer.train_dataloader
            words = [str(w.message) for w in caught if "does not have many workers" in str(w.message)]
            is_given = loader.sampler is options.get("sampler") or isinstance(loader.sampler, RandomSampler)
            found.append([is_given, loader.dataset is data, loader.batch_size, loader.num_workers, len(words)])
            found[-1].append("train_dataloader" in words[0] if words else "")
    return found


def test_a_loader_that_was_cut_has_what_the_users_has() -> None:
    for world_size in (1, 2):
        for found in run_ranks(world_size, look)[0]:
            assert found == [True, True, 6 // world_size, 0, 1, True]
