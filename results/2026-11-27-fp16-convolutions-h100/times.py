"""Times forms of a convolution kernel that reads channels side by side, prepared by a pass before it."""
import json, math, os, sys, time
import torch
import triton
import triton.language as tl
import torch.nn.functional as F

DEV = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


@triton.jit
def _to_tf32(x):
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit
def _lay(x, y, N, C: tl.constexpr, CP: tl.constexpr, H, W, HP, WP, PH: tl.constexpr, PW: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr):
    # one program: one padded row (n, h), BW columns, all channels in BC blocks
    row = tl.program_id(0)
    n, h = row // HP, row % HP
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    ih, iw = h - PH, w - PW
    inside = (c[:, None] < C) & (iw[None, :] >= 0) & (iw[None, :] < W) & (ih >= 0) & (ih < H)
    v = tl.load(x + n.to(tl.int64) * (C * H * W) + c[:, None] * (H * W) + ih * W + iw[None, :], mask=inside, other=0.0)
    if HALF:
        v = v.to(tl.float16)
    else:
        v = _to_tf32(v)
    v = tl.trans(v)
    at = y + (row.to(tl.int64) * WP + w[:, None]) * CP + c[None, :]
    tl.store(at, v, mask=(w[:, None] < WP) & (c[None, :] < CP))


@triton.jit
def _conv(x, w, b, out, N, OH, OW, HP, WP, CP: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KPAD: tl.constexpr,
          SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
          POINTS: tl.constexpr, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, SWAP: tl.constexpr, BYTAP: tl.constexpr, ORDER: tl.constexpr):
    task = tl.program_id(0)
    blocks: tl.constexpr = (CO + CHANNELS - 1) // CHANNELS
    if ORDER:
        cb = task % blocks
        pb = task // blocks
    else:
        np = (N * OH * OW + POINTS - 1) // POINTS
        cb = task // np
        pb = task % np
    channel = cb * CHANNELS + tl.arange(0, CHANNELS)
    point = pb * POINTS + tl.arange(0, POINTS)
    total = N * OH * OW
    inp = point < total
    pt = tl.minimum(point, total - 1)
    ow = pt % OW
    r = pt // OW
    oh = r % OH
    n = r // OH
    base = ((n * HP + oh * SH) * WP + ow * SW) * CP
    wbase = tl.minimum(channel, CO - 1) * KPAD
    k0 = tl.arange(0, LENGTH)
    if SWAP:
        acc = tl.zeros([CHANNELS, POINTS], tl.float32)
    else:
        acc = tl.zeros([POINTS, CHANNELS], tl.float32)
    for step in range(0, KPAD // LENGTH):
        if BYTAP:
            per: tl.constexpr = CP // LENGTH
            tap = step // per
            off = ((tap // KW) * DH * WP + (tap % KW) * DW) * CP + (step % per) * LENGTH + k0
        else:
            k = step * LENGTH + k0
            tap = k // CP
            off = ((tap // KW) * DH * WP + (tap % KW) * DW) * CP + k % CP
        if SWAP:
            if BYTAP:
                a = tl.load(x + (base[None, :] + off[:, None]))
            else:
                a = tl.load(x + (base[None, :] + off[:, None]), mask=(k < KH * KW * CP)[:, None], other=0.0)
            ww = tl.load(w + (wbase[:, None] + (step * LENGTH + k0)[None, :]))
            acc = tl.dot(ww, a, acc, input_precision="tf32")
        else:
            if BYTAP:
                a = tl.load(x + (base[:, None] + off[None, :]))
            else:
                a = tl.load(x + (base[:, None] + off[None, :]), mask=(k < KH * KW * CP)[None, :], other=0.0)
            ww = tl.load(w + (wbase[None, :] + (step * LENGTH + k0)[:, None]))
            acc = tl.dot(a, ww, acc, input_precision="tf32")
    bias = tl.load(b + channel, mask=channel < CO, other=0.0)
    place = out + n.to(tl.int64) * (CO * OH * OW) + oh * OW + ow
    if SWAP:
        acc = tl.maximum(acc + bias[:, None], 0.0)
        tl.store(place[None, :] + channel[:, None] * (OH * OW), acc, mask=inp[None, :] & (channel < CO)[:, None])
    else:
        acc = tl.maximum(acc + bias[None, :], 0.0)
        tl.store(place[:, None] + channel[None, :] * (OH * OW), acc, mask=inp[:, None] & (channel < CO)[None, :])


def prepare(x, pad, half):
    N, C, H, W = x.shape
    q = 8 if half else 4
    CP = -(-C // q) * q
    HP, WP = H + 2 * pad[0], W + 2 * pad[1]
    y = torch.empty((N, HP, WP, CP), dtype=torch.float16 if half else torch.float32, device=x.device)
    BC = min(64, triton.next_power_of_2(CP))
    BW = max(16, min(256, 4096 // BC))
    grid = (N * HP, triton.cdiv(WP, BW), triton.cdiv(CP, BC))
    _lay[grid](x, y, N, C, CP, H, W, HP, WP, pad[0], pad[1], half, BC, BW, num_warps=4)
    return y


def prepare_w(w, CP, half, LENGTH):
    CO, CI, KH, KW = w.shape
    K = KH * KW * CP
    KP = -(-K // LENGTH) * LENGTH
    y = torch.zeros((CO, KP), dtype=torch.float16 if half else torch.float32, device=w.device)
    z = torch.zeros((CO, KH, KW, CP), dtype=torch.float32, device=w.device)
    z[..., :CI] = w.permute(0, 2, 3, 1)
    if not half:
        bits = z.view(torch.int32)
        z = ((bits + 0x1000) & -0x2000).view(torch.float32)
    y[:, :K] = z.reshape(CO, K).to(y.dtype)
    return y, KP


def conv(y, wp, b, geo, cfg, half):
    (N, CO, OH, OW, KH, KW, s, d) = geo
    _, HP, WP, CP = y.shape
    P, CH, L, warps, stages, swap, order = cfg
    out = torch.empty((N, CO, OH, OW), device=y.device)
    bytap = CP % L == 0
    grid = (triton.cdiv(N * OH * OW, P) * triton.cdiv(CO, CH),)
    h = _conv[grid](y, wp, b, out, N, OH, OW, HP, WP, CP, CO, KH, KW, wp.shape[1], s[0], s[1], d[0], d[1], P, CH, L, swap, bytap, order, num_warps=warps, num_stages=stages)
    return out, h


def bench(f, n=10):
    if DEV == "cpu":
        f(); return 0.0
    f(); torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[len(ts) // 2]


SHAPES = {
    "l2_1": (128, 64, 128, 128, 128, 3, 3, (0, 0)),
    "l2_54": (64, 64, 256, 256, 64, 3, 3, (0, 0)),
    "l2_25": (128, 16, 256, 256, 64, 3, 3, (0, 0)),
    "l2_67": (128, 8, 256, 256, 64, 3, 3, (0, 0)),
    "l1_62": (8, 32, 512, 512, 64, 5, 9, (0, 0)),
    "l1_56": (8, 64, 512, 256, 128, 5, 7, (0, 0)),
    "l1_50": (256, 4, 224, 224, 96, 11, 11, (2, 2)),
    "alex2": (256, 96, 27, 27, 256, 5, 5, (2, 2)),
}
CFG = []
for half, L in ((False, 32), (True, 64)):
    for P, CH, warps in ((128, 128, 8), (256, 64, 4), (128, 128, 4), (256, 128, 8), (256, 64, 8), (128, 64, 4)):
        for swap in (False, True):
            CFG.append((half, (P, CH, L, warps, 3, swap, True)))
CFG.append((False, (128, 128, 32, 8, 4, False, True)))
CFG.append((False, (128, 128, 16, 8, 4, False, True)))
CFG.append((True, (128, 128, 32, 8, 4, False, True)))
CFG.append((True, (128, 128, 64, 8, 4, False, True)))


def main(names, seconds):
    end = time.time() + seconds
    rows = []
    for name in names:
        N, C, H, W, CO, KH, KW, pad = SHAPES[name]
        s = (4, 4) if name == "l1_50" else (1, 1)
        if DEV == "cpu":
            N, H, W = 1, 11 + KH, 9 + KW
        torch.manual_seed(0)
        x = torch.randn(N, C, H, W, device=DEV)
        w = torch.randn(CO, C, KH, KW, device=DEV) / math.sqrt(C * KH * KW)
        b = torch.randn(CO, device=DEV)
        OH, OW = (H + 2 * pad[0] - KH) // s[0] + 1, (W + 2 * pad[1] - KW) // s[1] + 1
        geo = (N, CO, OH, OW, KH, KW, s, (1, 1))
        flop = 2 * N * CO * OH * OW * C * KH * KW
        torch.backends.cudnn.allow_tf32 = True
        ref = F.conv2d(x[:2], w, b, s, pad).relu()
        truth = F.conv2d(x[:2].double(), w.double(), b.double(), s, pad).relu()
        err = lambda o: ((o[:2].double() - truth).norm() / truth.norm()).item()
        base = {"eager": bench(lambda: F.conv2d(x, w, b, s, pad))}
        if DEV != "cpu":
            xl, wl = x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last)
            base["to_last"] = bench(lambda: x.contiguous(memory_format=torch.channels_last))
            base["last"] = bench(lambda: F.conv2d(xl, wl, b, s, pad))
            torch.backends.cudnn.benchmark = True
            base["cudnn"] = bench(lambda: F.conv2d(x, w, b, s, pad))
            base["cudnn_last"] = bench(lambda: F.conv2d(xl, wl, b, s, pad))
            torch.backends.cudnn.benchmark = False
            del xl, wl
        for half in (False, True):
            base[f"prepare_{'half' if half else 'tf32'}"] = bench(lambda: prepare(x, pad, half))
        print(name, f"{flop/1e9:.0f} GF", {k: round(v) for k, v in base.items()}, f"eager error {err(ref):.2e}", {k: f"{flop/v/1e6:.0f}TF" for k, v in base.items() if v and "prep" not in k and "to_" not in k}, flush=True)
        ys = {half: prepare(x, pad, half) for half in (False, True)}
        cfgs = CFG if DEV != "cpu" else [(h, (32, 32, L, 4, 2, sw, True)) for h, L in ((False, 16), (True, 32)) for sw in (False, True)]
        for half, cfg in cfgs:
            if time.time() > end:
                break
            try:
                wp, KP = prepare_w(w, ys[half].shape[-1], half, cfg[2])
                out, h = conv(ys[half], wp, b, geo, cfg, half)
                e = err(out)
                del out
                t = bench(lambda: conv(ys[half], wp, b, geo, cfg, half), 5)
                asm = getattr(h, "asm", None)
                ptx = asm["ptx"] if asm else ""
                rows.append((name, half, cfg, t, e))
                print(name, "fp16" if half else "tf32", cfg, f"{t:.0f}us", f"{flop/max(t,1e-9)/1e6:.0f}TF" if t else "", f"error {e:.2e}", "wgmma" if "wgmma" in ptx else "mma", getattr(h, "n_regs", ""), getattr(h, "n_spills", ""), flush=True)
            except Exception as ex:
                print(name, half, cfg, "X", repr(ex)[:150], flush=True)
        del x, ys
        if DEV != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[2].split(","), float(sys.argv[1]))
