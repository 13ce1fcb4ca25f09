"""Which model families multiply by the weight of their final norm, and which by one plus it.

Checkpoints do not say; the class of the final norm in transformers' modelling code does. By `model_type`, of the text
part where a config has one. A family that is in neither set is not known here, and no export or check guesses.
"""

from __future__ import annotations


def _families(words: str) -> frozenset[str]:
    return frozenset(words.split())


ONE_PLUS_WEIGHT = _families(
    """
    gemma gemma2 gemma3 gemma3_text vaultgemma qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text
    minimax_m3_vl minimax_m3_vl_text step3p5 step3p7
    """
)
PLAIN_WEIGHT = _families(
    """
    afmoe apertus arcee aria aria_text axk1 axk2 bitnet chameleon cosmos3_edge cosmos3_edge_text cwm deepseek_ocr2
    deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 emu3 emu3_text_model
    ernie4_5 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text exaone4 exaone_moe flex_olmo gemma3n gemma3n_text gemma4
    gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_text glm4v_moe
    glm4v_moe_text glm5_next glm5_next_text glm_moe_dsa glm_ocr glm_ocr_text gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text
    hy_v3 hy_v4 hyperclovax jetmoe kimi_linear laguna llama llama4 llama4_text longcat_flash mellum mimo_v2_flash
    minicpm3 minimax minimax_m2 ministral ministral3 mistral mistral4 mixtral mllama mllama_text_model muse_glimmer
    muse_glimmer_text olmo2 olmo3 olmo_hybrid olmoe paddleocr_vl paddleocr_vl_text phi3 phi4_multimodal qwen2
    qwen2_5_omni qwen2_5_omni_text qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe
    qwen3_omni_moe_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text seed_oss smollm3 solar_open youtu zaya
    """
)
# Families whose code comes with the model, or with an engine, and is not in transformers.
PLAIN_ELSEWHERE = _families("baichuan bailing_moe deepseek internlm2 internlm3 kimi_k2 mimo minicpm")
