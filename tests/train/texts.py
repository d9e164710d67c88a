"""Texts of the tiny model with their features, without files."""

import torch

from outpace import Engine
from outpace.law import VocabMap
from outpace.methods.draft_model.on_policy import features
from outpace.train.batches import Batch


def written(target, count, *, seed, new=24, prompt=6, taps=("hidden.-1",), temperature=0.0, prompts=None):
    """One batch of answers that the target wrote to random prompts of different lengths, or to some."""
    coins = torch.Generator().manual_seed(seed)
    sizes = [prompt + i % 3 for i in range(count)] if prompts is None else [len(one) for one in prompts]
    if prompts is None:
        prompts = [torch.randint(2, target.vocab_size, (n,), generator=coins).tolist() for n in sizes]
    engine = Engine(target, drafter="none")
    results = engine.generate(
        prompts, max_new_tokens=new, ignore_eos=True, temperature=temperature, seed=seed
    )
    texts = [[*p, *r.tokens] for p, r in zip(prompts, results, strict=True)]
    longest = max(map(len, texts))
    token_BT = torch.zeros(count, longest, dtype=torch.int64)
    answer_BT = torch.zeros(count, longest, dtype=torch.bool)
    for i, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        token_BT[i, : len(text)] = torch.tensor(text)
        answer_BT[i, size : len(text)] = True
    lengths = [len(text) for text in texts]
    return Batch(
        token_BT=token_BT,
        length_B=torch.tensor(lengths),
        answer_BT=answer_BT,
        feature=features(target, token_BT, lengths, tuple(taps)),
    )


def most_used(batches, size, target):
    """A draft vocabulary of the tokens that the answers use most."""
    counts = torch.zeros(target.vocab_size)
    for batch in batches:
        used = batch.token_BT[batch.answer_BT]
        counts += torch.bincount(used, minlength=target.vocab_size)
    to_target_D = counts.topk(size).indices.sort().values
    feed_V = torch.full((target.vocab_size,), -1)
    feed_V[to_target_D] = torch.arange(size)
    return VocabMap(to_target_D, feed_V)


class Listed:
    """Batches from a list, epoch after epoch."""

    def __init__(self, batches):
        self.batches = batches

    def since(self, epoch=0, index=0):
        while True:
            if index >= len(self.batches):
                epoch, index = epoch + 1, 0
            yield epoch, index, self.batches[index]
            index += 1


def losses_of(made, batch, steps):
    """What an objective loses at every step of learning one batch."""
    optimizer, losses = torch.optim.Adam(made.module.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        step = made.loss(batch)
        step.loss.backward()
        losses.append(step.loss.item())
        optimizer.step()
    return losses
