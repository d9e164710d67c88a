"""What the objective counts in training is what the drafter guesses when it drafts."""

import pytest
import torch

from outpace import Engine
from outpace.methods.eagle3.objective import Eagle3, Eagle3Config
from outpace.models.tiny import tiny
from outpace.train.align import EAGLE, Aligned
from outpace.train.loop import LoopConfig, train
from tests.train.texts import Listed, most_used, written

TAPS = ("hidden.2", "hidden.1", "hidden.-1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A head after a few steps, its folder, and texts that it was not trained on."""
    target, folder = tiny(), tmp_path_factory.mktemp("eagle3")
    rows = [written(target, 16, seed=seed, new=24, taps=TAPS) for seed in range(3)]
    objective = Eagle3.build(Eagle3Config(), target, most_used(rows, 200, target))
    config = LoopConfig(steps=30, lr=4e-3, bf16=False)
    train(objective, Listed(rows), [], config, out=folder / "head", work=folder / "work")
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.copy_(parameter.bfloat16())  # as it is stored
    return objective, folder / "head", written(target, 12, seed=99, new=24, taps=TAPS)


def test_drafts_are_the_guesses_that_training_counts(trained):
    """Guess for guess: the first of every draft, and the second where the first was right."""
    objective, folder, batch = trained
    engine = Engine(objective.target, drafter="none")
    spec = f"eagle3[model={folder} tree_size=3 quantize=none]"
    drafter, drafts = engine.method(spec).drafter, []
    real = drafter.propose

    def watched(rows):
        given = [(list(row.tokens), row.budget.max_nodes) for row in rows]
        out = real(rows)
        drafts.extend((*one, draft.token_N) for one, draft in zip(given, out, strict=True))
        return out

    drafter.propose = watched
    prompts = [batch.token_BT[b, : int(batch.answer_BT[b].nonzero()[0])].tolist() for b in range(12)]
    engine.generate(prompts, drafter=spec, max_new_tokens=24, ignore_eos=True)
    aligned = Aligned(batch, EAGLE)
    with torch.no_grad():
        guess_JBA = [
            objective.vocab.to_target_D[objective.module.lm_head(out).argmax(-1)]
            for out in objective.unroll(batch, aligned, 2)
        ]
    row_of = {(b, int(aligned.place_BA[b, a])): (b, a) for b, a in aligned.real_BA.nonzero().tolist()}
    texts = [batch.token_BT[b, :n].tolist() for b, n in enumerate(batch.length_B.tolist())]
    same, shifted, checked = 0, 0, [0, 0]
    for tokens, _, drafted in drafts:
        b = next(b for b, text in enumerate(texts) if text[: len(tokens)] == tokens)
        place, text = len(tokens) - 2, texts[b]
        for depth in range(min(2, len(drafted))):
            if (b, place) not in row_of or list(drafted[:depth]) != text[len(tokens) :][:depth]:
                break
            at, a = row_of[b, place]
            checked[depth] += 1
            same += int(guess_JBA[depth][at, a]) == drafted[depth]
            before = row_of.get((b, place - 1))
            shifted += before is not None and int(guess_JBA[depth][before]) == drafted[depth]
    assert checked[0] > 100 and checked[1] > 10
    assert same >= 0.97 * sum(checked), "features are bfloat16 in training, so ties may differ"
    assert shifted < 0.6 * sum(checked), "planted: the row before guesses something else"
