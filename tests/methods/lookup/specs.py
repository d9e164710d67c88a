"""What the conformance suite runs besides the general shapes."""

from outpace.methods.lookup.datastore import write_datastore

SPECS = {
    "prompt_lookup": ["prompt_lookup", "prompt_lookup[min_ngram=1 tree=dynamic]"],
    "max_gram": ["max_gram", "max_gram[min_match=2 tree=2x2x1]"],
    "suffix": ["suffix", "suffix[tree=3x2x1]", "suffix[tree=dynamic]", "suffix[factor=1.5 verifier=chain]"],
    "adaptive_ngram": ["adaptive_ngram", "adaptive_ngram[max_order=3 tree=dynamic]"],
    "reference": ["reference", "reference[tree=[-1,-1,0,1,2,4,5]]", "reference[tree=dynamic]"],
    "retrieval": [
        "retrieval[store=small.store]",
        "retrieval[store=small.store min_ngram=1 tree=3x2x1]",
        "retrieval[store=small.store min_ngram=1 tree=dynamic]",
    ],
    "recycling": [
        "recycling",
        "recycling[tree=dynamic]",
        "recycling[table=small.store successors=3 tree=[-1,-1,0,2,2,1] verifier=match]",
    ],
    "lookahead": ["lookahead", "lookahead[ngram=4 window=4 tree=3x2x1]"],
}


def make(target, folder, texts):
    write_datastore(texts, target.tokenizer, folder / "small.store")
