"""What vLLM's worker holds after it was told that requests have ended, for test_vllm_routes.py."""

import os
from pathlib import Path

from vllm_extension import WorkerExtension


class CountingExtension(WorkerExtension):
    def molt_routes_drop(self, requests):
        super().molt_routes_drop(requests)
        Path(os.environ["HELD_ROWS"]).write_text(str(len(self.molt_routes._collected)))
