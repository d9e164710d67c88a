"""``model.generate`` of transformers through ``outpace.hf.decode``: same ids, wishes honoured or refused."""

import copy
from functools import partial

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import outpace
from outpace.sampling import Warp

LENGTH = 24
SAMPLED = dict(do_sample=True, temperature=0.8, top_k=3, top_p=0.9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(2)
    ids, mask = torch.randint(6, 61, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    for row, pads in enumerate((4, 0, 1)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class Parity(LogitsProcessor):
    """Reads the whole text, padding included: after an even sum, odd tokens only."""

    def __call__(self, input_ids, scores):
        even = input_ids.sum(1) % 2 == 0
        scores[even, ::2] = -torch.inf
        return scores


class Multiple(StoppingCriteria):
    """Ends a row at a token that its number divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % (7 + torch.arange(len(input_ids))) == 0


WISHES = {
    "none": {},
    "repetition": dict(repetition_penalty=1.4),
    "n-grams": dict(no_repeat_ngram_size=2),
    "length": dict(min_new_tokens=20, exponential_decay_length_penalty=(5, 1.2)),
    "words": dict(bad_words_ids=[[7], [8, 9]]),
    "by row": dict(prefix_allowed_tokens_fn=lambda row, ids: [10 + row, 20 + row, 30]),
    "own processor": dict(logits_processor=LogitsProcessorList([Parity()])),
    "own criterion": dict(stopping_criteria=StoppingCriteriaList([Multiple()])),
    "own shorter length": dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(14)])),
    "own longer length": dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(36)])),
    "own length in the prompt": dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(3)])),
    "warper in greedy": dict(typical_p=0.5),
}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "layer_skip", "auto"])
@pytest.mark.parametrize("wish", WISHES)
def test_a_batch_with_padding_gets_the_ids_of_generate(model, batch, wish, drafter):
    if drafter == "layer_skip":  # it needs the own decoder
        given = dict(drafter="layer_skip[skip=1]", backend="own")
    else:
        given = dict(drafter=drafter)
    wanted = model.generate(**batch, max_new_tokens=LENGTH, do_sample=False, **WISHES[wish])
    ids = model.generate(
        **batch,
        max_new_tokens=LENGTH,
        do_sample=False,
        custom_generate=outpace.hf.decode,
        **given,
        **WISHES[wish],
    )
    assert torch.equal(ids, wanted)


def test_samples_have_the_distribution_of_generate_and_a_seed(model):
    one = torch.tensor([[7, 8, 9, 7, 8]])
    many, settings = one.expand(240, -1), dict(max_new_tokens=2, **SAMPLED, typical_p=0.9)
    torch.manual_seed(5)
    ours = model.generate(many, custom_generate=outpace.hf.decode, drafter="prompt_lookup", **settings)
    torch.manual_seed(5)
    again = model.generate(many, custom_generate=outpace.hf.decode, drafter="none", **settings)
    assert torch.equal(ours, again)
    theirs = model.generate(many, **settings)
    for place in (-2, -1):
        counts = torch.stack([torch.bincount(ids[:, place], minlength=61) for ids in (ours, theirs)]) / 240
        assert float((counts[0] - counts[1]).abs().sum()) / 2 < 0.14  # about 3 deviations of equal laws
        assert set(counts[0].nonzero().flatten().tolist()) == set(counts[1].nonzero().flatten().tolist())


def test_warpers_become_settings_and_other_rules_stay_in_front(model, batch, monkeypatch):
    seen = []
    real = outpace.hf.SamplingParams
    monkeypatch.setattr(outpace.hf, "SamplingParams", lambda **given: seen.append(given) or real(**given))
    model.generate(**batch, max_new_tokens=2, custom_generate=outpace.hf.decode, **SAMPLED)
    assert (seen[0]["temperature"], seen[0]["top_k"], seen[0]["top_p"]) == (0.8, 3, 0.9)
    assert not seen[0]["processors"]
    model.generate(**batch, max_new_tokens=2, custom_generate=outpace.hf.decode, typical_p=0.5, **SAMPLED)
    assert seen[-1]["temperature"] == 1.0 and len(seen[-1]["processors"]) == 4  # typical_p comes last


@pytest.mark.parametrize(
    ("warper", "kept"),
    [
        (TopPLogitsWarper(0.01, min_tokens_to_keep=5), 5),
        (TopPLogitsWarper(0.0), 1),
        (MinPLogitsWarper(1.0, min_tokens_to_keep=5), 5),
        (TopKLogitsWarper(1, filter_value=0.0), 61),
        (TopKLogitsWarper(3), 3),
    ],
)
def test_a_warper_of_ones_own_keeps_all_its_settings(model, monkeypatch, warper, kept):
    seen = []
    real = Warp.law
    monkeypatch.setattr(Warp, "law", lambda *given: seen.append(real(*given)) or seen[-1])
    model.generate(
        torch.tensor([[7, 8, 9]]),
        max_new_tokens=1,
        custom_generate=outpace.hf.decode,
        drafter="none",
        logits_processor=LogitsProcessorList([warper]),
        **SAMPLED | dict(temperature=1.0, top_k=0, top_p=1.0),
    )
    assert int((seen[-1].prob_S > 0).sum()) == kept


def test_top_k_keeps_equal_tokens_as_transformers_does(model, monkeypatch):
    seen = []
    real = Warp.law
    monkeypatch.setattr(Warp, "law", lambda *given: seen.append(real(*given)) or seen[-1])
    coarse = copy.deepcopy(model).to(torch.bfloat16)
    coarse.lm_head.weight.data[6:] = coarse.lm_head.weight.data[6]
    prompt, settings = torch.tensor([[7, 8, 9]]), SAMPLED | dict(top_k=7, top_p=1.0, drafter="none")
    coarse.generate(prompt, max_new_tokens=1, custom_generate=outpace.hf.decode, **settings)
    logits = coarse(prompt).logits[0, -1].float()
    wanted = (logits / 0.8).masked_fill(logits < logits.topk(7).values[-1], -torch.inf).softmax(0)
    assert int((wanted > 0).sum()) > 7
    assert torch.allclose(seen[-1].prob_S, wanted, atol=1e-6)
    flat = LogitsProcessorList([TopKLogitsWarper(1, filter_value=-9.0)])
    given = settings | dict(logits_processor=flat, max_new_tokens=1)
    model.generate(prompt, custom_generate=outpace.hf.decode, **given)
    assert int((seen[-1].prob_S > 0).sum()) == 61


def test_a_streamer_gets_prompt_and_tokens_once(model):
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], 0

        def put(self, ids):
            self.got += ids.flatten().tolist()

        def end(self):
            self.ended += 1

    streamer, ids = Streamer(), torch.tensor([[7, 8, 9, 7, 8]])
    bound = partial(outpace.hf.decode, streamer=streamer)
    out = model.generate(
        ids, max_new_tokens=LENGTH, do_sample=False, custom_generate=bound, drafter="prompt_lookup"
    )
    assert streamer.got == out[0].tolist() and streamer.ended == 1


def test_a_dictionary_on_request(model, batch):
    out = model.generate(
        **batch,
        max_new_tokens=3,
        custom_generate=outpace.hf.decode,
        return_dict_in_generate=True,
        do_sample=False,
    )
    assert torch.equal(out.sequences, model.generate(**batch, max_new_tokens=3, do_sample=False))


HOLE = torch.ones(3, 9, dtype=torch.int64)
HOLE[1, 4] = 0
REFUSED = {
    "attention_mask hides": dict(attention_mask=HOLE),
    "attention_mask hides tokens": dict(attention_mask=torch.arange(9).lt(7).int().expand(3, -1)),
    "position_ids": dict(attention_mask=None, position_ids=torch.arange(9).expand(3, -1) + 2),
    "num_beams=2": dict(num_beams=2),
    "contrastive_search": dict(penalty_alpha=0.6, top_k=4),
    "dola_generation": dict(dola_layers="low"),
    "output_scores": dict(output_scores=True, return_dict_in_generate=True),
    "UnbatchedClassifierFreeGuidance": dict(guidance_scale=2.0),
    "inputs_embeds": dict(inputs_embeds=torch.zeros(3, 9, 32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model, batch, name):
    with pytest.raises(outpace.RequestError, match=name):
        given = batch | REFUSED[name]
        model.generate(**given, max_new_tokens=3, custom_generate=outpace.hf.decode)


def test_a_recurrent_model_comes_with_an_empty_cache(batch):
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=0)
    torch.manual_seed(0)
    recurrent = MambaForCausalLM(MambaConfig(**sizes)).eval()
    settings = batch | dict(max_new_tokens=6, do_sample=False)
    ids = recurrent.generate(**settings, custom_generate=outpace.hf.decode)
    assert torch.equal(ids, recurrent.generate(**settings))
    with pytest.raises(outpace.RequestError, match="cache_params holds tokens"):
        recurrent.generate(
            **settings,
            cache_params=recurrent(batch["input_ids"], use_cache=True).cache_params,
            custom_generate=outpace.hf.decode,
        )


def test_an_encoder_decoder_is_sent_elsewhere():
    sizes = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    both = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    prompt = torch.tensor([[7, 8, 9]])
    with pytest.raises(outpace.RequestError, match=r"Engine\.load"):
        both.generate(prompt, max_new_tokens=3, custom_generate=outpace.hf.decode)
    assert outpace.Engine.load(both, drafter="none").generate([7, 8, 9], max_new_tokens=3).tokens


def test_a_batch_has_no_streamer(model, batch):
    with pytest.raises(outpace.RequestError, match="batch of 3"):
        model.generate(
            **batch, max_new_tokens=3, custom_generate=partial(outpace.hf.decode, streamer=object())
        )


def test_the_engine_lives_with_the_model_and_notices_new_weights(model, batch):
    own = copy.deepcopy(model)
    settings = dict(max_new_tokens=8, do_sample=False)
    own.generate(**batch, custom_generate=outpace.hf.decode, **settings)
    first = own._outpace_engines["auto"][1]
    own.generate(**batch, custom_generate=outpace.hf.decode, **settings)
    assert own._outpace_engines["auto"][1] is first
    assert not copy.deepcopy(own)._outpace_engines
    with torch.no_grad():
        own.lm_head.weight.mul_(-1)
    ids = own.generate(**batch, custom_generate=outpace.hf.decode, **settings)
    assert own._outpace_engines["auto"][1] is not first
    assert torch.equal(ids, own.generate(**batch, **settings))


def test_the_written_folder_does_the_same(model, batch, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    files = outpace.hf.write_folder(tmp_path / "fast")
    assert [file.name for file in files] == ["generate.py", "requirements.txt"]
    settings = dict(max_new_tokens=8, do_sample=False)
    ids = model.generate(
        **batch,
        custom_generate=str(tmp_path / "fast"),
        trust_remote_code=True,
        drafter="prompt_lookup",
        **settings,
    )
    assert torch.equal(ids, model.generate(**batch, **settings))
