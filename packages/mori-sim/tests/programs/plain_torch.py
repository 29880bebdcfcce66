"""A FlyDSL program as it would be written for a GPU: it knows nothing of the simulator."""

import rows
import torch

assert torch.cuda.is_available()
assert torch.cuda.device_count() == 2
device = torch.device("cuda")
torch.manual_seed(0)
height, width = 5, 512

x = torch.randn(height, width, device=device, dtype=torch.bfloat16)
codes = torch.empty(height, width, device="cuda", dtype=torch.float8_e4m3fn)
scales = torch.empty(height, device=x.device)
y = torch.zeros_like(x)
assert x.is_cuda
assert y.device == torch.device("cuda", 0)
assert not torch.zeros(3).is_cuda
assert (x + 1).is_cuda
assert x[1:, :8].is_cuda
assert torch.ones(2, device="cuda:1").device.index == 1

stream = torch.cuda.Stream()
quantise, dequantise = rows.quantiser(width), rows.dequantiser(width)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    start.record()
    quantise(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), height, stream=torch.cuda.current_stream())
    dequantise(codes.data_ptr(), scales.data_ptr(), y.data_ptr(), height, stream=torch.cuda.current_stream())
    end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0

want_codes, want_scales = rows.quantised(x.cpu())
assert not want_codes.is_cuda
assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))
assert torch.equal(scales.to("cpu"), want_scales)
assert torch.equal(y, rows.dequantised(codes, scales))
assert (y - x).abs().max().item() < 0.3
print("ok plain_torch")
