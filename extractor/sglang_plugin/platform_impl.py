"""SGLang on any CPU: PyTorch kernels only, no Intel AMX, no graph capture.

Without it SGLang 0.5.23 on a CPU without AMX fails in the rotary embedding or while importing `sgl_kernel`.
"""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


class TorchCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        # DeepSeek and Kimi: torch_native reads the latent KV cache, so of the forms of MLA only the absorbed one fits.
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

        AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
