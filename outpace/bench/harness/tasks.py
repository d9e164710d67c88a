"""Tasks to score: names that the harness knows, YAML files of its form, and plain JSON lines.

Rows of JSON lines say what is asked of them:

    {"question": ..., "choices": [...], "answer": 1}    which choice is likeliest; counted from 0
    {"question": ..., "answer": "..."}                  the answer, generated up to the end of a line
    {"text": ...}                                       how likely the text is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.errors import RequestError
from outpace.files import expanded, parse_json, read_text

SAMPLE = "sample"
"""Three short tasks that come with the package."""
_FOLDER = Path(__file__).parent
_PARTS = ("sample_choices", "sample_answers", "sample_texts")

Task = str | dict[str, Any]


def read_tasks(names: Sequence[str]) -> tuple[list[Task], list[Path]]:
    """Tasks for the harness.

    Args:
        names: of the harness, ``sample``, or files that end in .yaml or .jsonl.

    Returns:
        Names and configurations; and folders in which the harness looks for more of them.

    Raises:
        RequestError: a file that cannot be read, or holds no task.
    """
    tasks: list[Task] = []
    folders: list[Path] = []
    for name in names:
        path = expanded(name)
        if name == SAMPLE:
            tasks += [of_rows(part, read_rows(_FOLDER / f"{part}.jsonl")) for part in _PARTS]
        elif path.suffix == ".jsonl":
            tasks.append(of_rows(path.stem, read_rows(path)))
        elif path.suffix in (".yaml", ".yml"):
            tasks.append(_of_yaml(path, folders))
        elif path.exists():
            raise RequestError(f"{name} is no task; give a .yaml or .jsonl file, or the name of a task")
        else:
            tasks.append(name)
    return tasks, folders


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines.

    Raises:
        RequestError: it cannot be read, or a line holds something else.
    """
    rows = []
    for number, line in enumerate(read_text(path, f"task {path}").splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise RequestError(f"{path}, line {number}: no JSON ({error})") from error
            if not isinstance(row, dict):
                raise RequestError(f"{path}, line {number}: must be an object, got {type(row).__name__}")
            rows.append(row)
    if not rows:
        raise RequestError(f"task {path} is empty; give one object per line")
    return rows


def of_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A task of the harness whose kind is seen from its rows.

    Raises:
        RequestError: rows of no known form, or of several.
    """
    for number, row in enumerate(rows, 1):
        if fault := _fault(row):
            raise RequestError(f"task {name}, row {number}: {fault}")
    kinds = {_kind(row) for row in rows}
    if len(kinds) > 1:
        raise RequestError(
            f"task {name} has rows of {len(kinds)} forms ({', '.join(sorted(kinds))}); give one"
        )
    kind = kinds.pop()
    made: dict[str, Any] = {
        "task": name,
        "test_split": "test",
        "output_type": kind,
        "custom_dataset": lambda **unused: _dataset(rows),
        "metadata": {"version": 1.0},
    }
    if kind == "multiple_choice":
        return made | {
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    if kind == "generate_until":
        return made | {
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 48, "do_sample": False},
            "filter_list": [
                {
                    "name": "stripped",
                    "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
                }
            ],
            "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
        }
    return made | {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }


def _kind(row: Mapping[str, Any]) -> str:
    if "choices" in row:
        return "multiple_choice"
    return "generate_until" if "question" in row else "loglikelihood_rolling"


def _fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row."""
    kind = _kind(row)
    if kind == "loglikelihood_rolling":
        good = isinstance(row.get("text"), str) and bool(row["text"].strip())
        return None if good else "needs question and answer, question, choices and answer, or text"
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        return "'question' must be text"
    if kind == "generate_until":
        return None if isinstance(row.get("answer"), str) else "'answer' must be text"
    choices, answer = row["choices"], row.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(c, str) and c for c in choices)
    ):
        return "'choices' must be two texts or more"
    right = type(answer) is int and 0 <= answer < len(choices)
    return None if right else f"'answer' must be a number from 0 to {len(choices) - 1}"


def _dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list([dict(row) for row in rows])})


def _of_yaml(path: Path, folders: list[Path]) -> Task:
    """A task by its configuration; one that holds functions is found by the harness, in its folder."""
    import yaml

    text = read_text(path, f"task {path}")
    try:
        made = yaml.safe_load(text)
    except yaml.constructor.ConstructorError:
        folders.append(path.parent)
        return path.stem
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(made, dict) or not isinstance(made.get("task"), str):
        raise RequestError(f"{path} must be the configuration of a task, with a name as 'task'")
    if "include" in made:
        folders.append(path.parent)
        return str(made["task"])
    files = (made.get("dataset_kwargs") or {}).get("data_files")
    if made.get("dataset_path") == "json" and isinstance(files, dict):
        found = {split: read_rows(path.parent / str(file)) for split, file in files.items()}
        made = {key: value for key, value in made.items() if key not in ("dataset_path", "dataset_kwargs")}
        made["custom_dataset"] = lambda **unused: _splits(found)
    return made


def _splits(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({name: Dataset.from_list([dict(row) for row in rows]) for name, rows in found.items()})
