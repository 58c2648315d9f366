"""The options of the scheduler. To remove an option, delete its folder and its lines here."""

from services.scheduler.options.transfer_option import TransferOption
from services.scheduler.options.transfers import OffloadedBlocks

TRANSFERS: type[TransferOption] = TransferOption
TRANSFERS = OffloadedBlocks
