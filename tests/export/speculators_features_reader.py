"""Run by the speculators environment: reads an exported data set with the real library, and writes what its trainer gets.

python speculators_features_reader.py FOLDER TRANSFER OUT.safetensors
"""

import sys
from pathlib import Path

from hs_connectors import FileTransfer, HiddenStatesBackend
from safetensors.torch import save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.train.data import ArrowDataset

folder, backend, out = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
arguments = type("Arguments", (), {"hidden_states_path": None})()
transfer = HiddenStatesBackend.registry[backend].from_train_args(arguments, str(folder))
assert isinstance(transfer, FileTransfer)
data = ArrowDataset(max_len=512, datapath=folder, transfer=transfer, on_missing="raise")
found = {}
for index in range(len(data)):
    check_hidden_states(transfer.get_cached(index), data.data[index]["input_ids"].tolist())
    item = data[index]
    assert isinstance(item, dict), item
    found |= {f"{index}/{name}": tensor.contiguous() for name, tensor in item.items()}
save_file(found, out)
