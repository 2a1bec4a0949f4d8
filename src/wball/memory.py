"""How much memory of a GPU is left."""

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that this process can still allocate, including the allocator's cache.

    Other processes may hold some, and this one may have been given a share
    (``torch.cuda.set_per_process_memory_fraction``).
    """
    taken, (free, total) = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - taken
    return max(0, int(min(allowed, free + torch.cuda.memory_reserved(device) - taken)))
