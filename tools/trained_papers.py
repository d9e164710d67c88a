"""What the papers of trained drafters report, and what holds each method back on the small model."""

PAPERS = {
    "eagle3": (
        "4.44 x, 6.23 per pass: Llama-3.1-8B, five tasks, T = 0; by others 3.02 x, 5.71: Vicuna-13B, A100",
        "three unrolled passes make a step dear, so it sees few texts",
    ),
    "hydra": (
        "2.07 x, 3.26 per pass: Vicuna-7B, Spec-Bench, A100, greedy, trees of 64",
        "a level is a run of heads and of the unembedding, as dear as a layer",
    ),
    "medusa": (
        "1.71 x, 2.31 per pass: Vicuna-7B, Spec-Bench, A100, greedy, trees of 64; first guess 0.56",
        "its later heads do not know the guesses before theirs",
    ),
    "glide": (
        "up to 2.17 x, 2.5 x with cape: Vicuna-7B, H100, batch 1",
        "it reads keys of one layer and no feature, so the first guess learns slowly",
    ),
    "fspad": (
        "0.28 to 0.48 tokens per pass over EAGLE-2: Vicuna and Llama-3, Spec-Bench",
        "nine tenths of its loss are features; at this rate that part first grows, and the guesses wait",
    ),
    "falcon": (
        "3.10 x, 3.34 per pass: Vicuna-7B, MT-Bench, H800, greedy, trees of 166",
        "two LSTM layers start at random and run token by token: a step takes three times that of eagle3",
    ),
    "mtp": (
        "1.8 x: DeepSeek-V3, one module trained with the model, 0.85 to 0.90 of second tokens accepted",
        "the module comes late: the target was never trained to foretell two tokens",
    ),
    "redrafter": (
        "up to 2.8 x: Vicuna, MT-Bench, H100, beams",
        "a recurrent state must be learned anew, and every beam pays the unembedding",
    ),
    "lstm": (
        "179 tokens per second with suffix drafts, 76 without any: Arctic, vLLM 0.8.4, ShareGPT",
        "gates start at random; a server batches what costs a whole level here",
    ),
    "mlp_speculator": (
        "2 to 3 x in a production server: Llama2-13B and Granite-20B, 3 to 5 guesses",
        "no text but the last state and the guesses, and heads that start at random",
    ),
    "coral": (
        "up to 3.9 x, not lossless: Mistral-7B tuned on it, blocks of 16",
        "the target reads every text again in training, and its last layer alone foretells little",
    ),
    "streaming": (
        "1.8 to 3.1 x on summaries and structured queries, the model tuned with it",
        "the target reads every text again in training, so there are few steps",
    ),
    "s2d": (
        "1.34 x, 2.86 per pass: Vicuna-7B, Spec-Bench, one draft for three targets, T = 0",
        "its exits need six to eighteen of thirty layers for a guess",
    ),
    "dflash": (
        "up to 6.17 x: Qwen3-8B; 5.40 per pass on GSM8K for Qwen3-4B, T = 1, blocks of 7",
        "all guesses of a block learn at once from few texts, and later slots learn last",
    ),
    "s3d": (
        "1.4 to 2 x over quantized EAGLE: Phi-3, low-memory GPU",
        "half the layers run for a guess, and the target runs in every step of training",
    ),
    "kangaroo": (
        "up to 1.68 x as a chain: Vicuna-7B and 13B, Spec-Bench, greedy",
        "a shallow state knows little of the next token, and a level runs layers of the target",
    ),
    "ppd": (
        "2.12 to 2.49 x, 2.43 per pass: MobileLLaMA-1.4B and Vicuna, A100, trees of 60 to 285",
        "three vectors are all that learns, and the target runs in every step of training",
    ),
    "draft_model": (
        "0.49 to 0.61 tokens per pass more by distillation (DistillSpec): T5-XL, GSM8K and XSum",
        "two layers without the target's features know too little of the text",
    ),
    "early_exit": (
        "1.82 to 2.16 x: Llama-2-7B and 13B tuned to leave early, CNN/DM and code, greedy",
        "one exit of a target that was never tuned for it, with a trained norm and projection alone",
    ),
    "dspark": (
        "6.11 per pass on GSM8K, 3.64 on MT-Bench: Qwen3-4B, T = 1, blocks of 7",
        "as dflash; its Markov head learns which token follows which only from many texts",
    ),
    "jetspec": (
        "4.58 x on MT-Bench, 9.64 x on MATH-500: Qwen3-8B, H100, greedy, trees of 256",
        "as dflash; its trees need rows that cost nothing",
    ),
    "sec": (
        "11.2 % faster, not lossless, 1.7 of 16 layers skipped: GPT-2 and CodeGen-350M, code",
        "the exits of s2d, and no guess at all where its classifier doubts",
    ),
}
"""Method -> its paper's figures with their conditions, and what holds it back here."""
