"""`moe-eval RUN --tasks NAMES`: tasks of lm-eval, the harness of EleutherAI, on any language model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from typing_extensions import override

from moe_lightning.cli.evaluate import next_token_logits
from moe_lightning.cli.language_model import LanguageModel
from moe_lightning.data.chat_formats import ChatFormat
from moe_lightning.data.conversations import Turn
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.generation import Sampling
from moe_lightning.models.huggingface.loading import known_tokens

Results = dict[str, dict[str, Any]]
"""Metrics of tasks and of groups of these, by the name of the task and "METRIC,FILTER", as lm-eval returns them."""


def measure_tasks(
    model: LanguageModel,
    names: Sequence[str],
    *,
    batch_size: int,
    num_fewshot: int | None = None,
    limit: int | None = None,
    as_dialogue: bool = False,
) -> Results:
    """Measure a model on tasks.

    Args:
        names: of tasks or groups of lm-eval, or paths of YAML files that describe one.
        batch_size: sequences at a time.
        num_fewshot: solved examples before each question; None: as many as the task has.
        limit: samples of each task; None: all.
        as_dialogue: write questions as messages to the model, and solved examples as earlier ones.

    Raises:
        ConfigurationError: a task is not known, its data cannot be loaded, or the model has no format of dialogues.
    """
    # The index of all tasks takes seconds.
    manager = _Tasks(include_defaults=not all(Path(name).is_file() for name in names))
    unknown = [name for name in names if name not in manager.task_index and not Path(name).is_file()]
    if unknown:
        raise ConfigurationError(
            f"--tasks {unknown[0]} is neither a task of lm-eval nor a YAML file of one: lm-eval ls tasks lists them"
        )
    with redirect_stdout(sys.stderr):  # some metrics print
        found = simple_evaluate(
            model=_Harnessed(model, batch_size, model.chat() if as_dialogue else None),
            tasks=list(names),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=as_dialogue,
            log_samples=False,
        )
    results: Results = found["results"]
    return results


class _Tasks(TaskManager):  # type: ignore[misc]
    """Tasks, which load their data when they are built."""

    @override
    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # every task is a program of its own
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigurationError(
                f"--tasks {','.join(task_list)} cannot be loaded, with data that lm-eval gets from the Hub: {reason}"
            ) from error


class _Harnessed(TemplateLM):  # type: ignore[misc]
    """A language model as lm-eval asks it: for likelihoods of continuations and of texts, and for continuations."""

    def __init__(self, model: LanguageModel, batch_size: int, written: ChatFormat | None) -> None:
        super().__init__()
        self._model, self._batch_size, self._written = model, batch_size, written
        self._tokenizer = model.text.tokenizer

    @cached_property
    def eot_token_id(self) -> int:
        """Token before a text that has nothing before it: that of a beginning or an end, or else that of a new line.

        config.json may name a beginning that the tokenizer does not have, as those of Qwen do.
        """
        theirs = self._model.theirs
        found = [] if theirs is None else [theirs.bos_token_id, theirs.eos_token_id]
        if not self._model.is_ours:
            named = self._model.network.config.get_text_config().bos_token_id
            found.append(known_tokens(named, self._tokenizer.added))
        found += sorted(self._model.ends)
        return int(next((token for token in found if token is not None), self._bare("\n")[0]))

    @cached_property
    def _ends(self) -> list[str]:
        """Texts that end an answer: that of the tokenizer's end, and in a dialogue that of its format."""
        theirs, found = self._model.theirs, list[str]()
        if theirs is not None and theirs.eos_token_id is not None:
            found.append(theirs.decode([theirs.eos_token_id]))
        with suppress(ValueError):  # of a template that refuses a conversation of one question
            found += [self._written.end] if self._written is not None and self._written.end else []
        return found

    @cached_property
    def _preferred(self) -> dict[str, Any]:
        """Options of generation that a task need not name: those of the folder and of transformers."""
        if self._model.is_ours:
            return {}
        named = self._model.network.generation_config.to_dict()
        return {"top_k": 50} | {name: value for name, value in named.items() if value is not None}

    @cached_property
    def _beginning(self) -> str:
        return self._model.text.decode([self.prefix_token_id])

    def _bare(self, text: str) -> list[int]:
        """Tokens of a text that does not begin here."""
        ids: list[int] = self._tokenizer.encode(text)[0].tolist()
        return ids

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is False or string.startswith(self._beginning):
            return self._bare(string)
        return self._model.text.begin(string)

    @override
    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a question and of an answer; where one token has the end of the question and the whole answer, the
        answer's tokens are those that it has by itself.
        """
        if not continuation:
            raise ConfigurationError("--tasks: an answer is empty, which has no likelihood: give it a text in the task")
        before, after = super()._encode_pair(context, continuation)
        return before, after or self._bare(continuation)

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's cache of requests."""
        return self._model.name

    @override
    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self._written is not None
        turns = [Turn(message["role"], message["content"]) for message in chat_history]
        if add_generation_prompt:
            return self._written.prompt(turns)
        return self._written.prompt(turns[:-1]) + chat_history[-1]["content"]  # the answer has begun

    @override
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        def length(index: int) -> int:
            return len(requests[index][1]) + len(requests[index][2])

        order = sorted(range(len(requests)), key=length, reverse=True)  # little padding, and the largest batch first
        found: dict[int, tuple[float, bool]] = {}
        for start in tqdm(range(0, len(order), self._batch_size), desc="batches", disable=disable_tqdm or None):
            batch = order[start : start + self._batch_size]
            found |= zip(batch, self._likelihoods([requests[index][1:] for index in batch]), strict=True)
        return [found[index] for index in range(len(requests))]

    def _likelihoods(self, pairs: Sequence[Sequence[list[int]]]) -> Iterator[tuple[float, bool]]:
        """The log-likelihood of each continuation of tokens, and True if it is the most likely one."""
        kept = [(before + after)[-self._model.positions - 1 :] for before, after in pairs]
        for ids in kept:
            self._model.check_known(ids, "a task")
        logits_BLV = next_token_logits(self._model, [torch.tensor(ids[:-1]) for ids in kept])
        for ids, (_, after), logits_LV in zip(kept, pairs, logits_BLV, strict=True):
            end, first = len(ids) - 1, max(0, len(ids) - 1 - len(after))
            targets_T = torch.tensor(ids[first + 1 :], device=logits_LV.device)
            scores_TV = logits_LV[first:end].float().log_softmax(-1)
            is_likeliest = bool((scores_TV.argmax(-1) == targets_T).all())
            yield float(scores_TV.gather(1, targets_T[:, None]).sum()), is_likeliest

    @override
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self._model.positions, 1)
            pairs = [make_disjoint_window(pair) for pair in rolling]
            windows += [(None, before, after) for before, after in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @override
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = tqdm(requests, desc="texts", disable=disable_tqdm or None)
        return [self._continued(*request.args) for request in texts]

    def _continued(self, prompt: str, given: dict[str, Any]) -> str:
        options = self._preferred | normalize_gen_kwargs(given)
        stops, count = [stop for stop in options["until"] if stop] + self._ends, options["max_gen_toks"]
        temperature = options.get("temperature") if options["do_sample"] else None
        sampling = Sampling(
            temperature=temperature or None, top_k=options.get("top_k") or None, top_p=options.get("top_p", 1.0)
        )
        most = self._model.positions
        ids = self.tok_encode(prompt)[-(most - min(count, most // 2)) :]
        self._model.check(ids, "a task")
        new: list[int] = []

        def is_done(token: int) -> bool:
            if token in self._model.ends:
                return True
            new.append(token)
            so_far = self._model.text.decode(new)
            return any(stop in so_far for stop in stops)

        self._model.generate(ids, sampling, count, is_done)
        theirs = self._model.theirs
        written = self._model.text.decode(new) if theirs is None else theirs.decode(new, skip_special_tokens=True)
        text: str = postprocess_generated_text(written, stops, None)
        return text
