"""What can go wrong while a cache is running. Bad arguments are ValueError or TypeError, as everywhere."""


class KVCupyError(Exception):
    """Base of the errors that kvcupy raises for the state of a cache or a device."""


class OutOfPages(KVCupyError):
    """A reservation needs more pages than are free. Nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"out of pages: {needed} needed, {free} free")
        self.needed = needed
        self.free = free


class StaleStep(KVCupyError):
    """A step was used after its sequences were reserved again, forked, truncated, freed or cancelled."""


class IntegrityError(KVCupyError):
    """The allocator's own books do not agree: a defect of kvcupy, never of its caller."""


class DeviceUnavailable(KVCupyError):
    """The device asked for cannot run on this machine. The message says what is missing, in one line."""
