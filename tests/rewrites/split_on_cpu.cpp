// Drives the kernels around the split product on a CPU; the product itself is the caller's.
static Operands operands(const float* x, const float* y, char* work, const Sizes& s, int processors) {
    Layout layout(s);
    return {{operand(s, layout, 0, x, work, processors), operand(s, layout, 1, y, work, processors)}};
}

extern "C" void layout_of(const Sizes* s, int64_t* out) {
    Layout l(*s);
    int64_t all[] = {l.high[0], l.low[0], l.high[1], l.low[1], l.marks[0], l.marks[1], l.shifts[0], l.shifts[1], l.parts};
    std::copy(std::begin(all), std::end(all), out);
}

// Splits both operands; how they are split, as two digits.
extern "C" int split_both(const float* x, const float* y, char* work, const Sizes* s, int processors) {
    Operands both = operands(x, y, work, *s, processors);
    const Operand &a = both.of[0], &b = both.of[1];
    Layout layout(*s);
    memset(work + layout.flag, 0, layout.shifts[0] - layout.flag);
    int shared_rows = (a.way >= SPANS ? a.blocks : 0) + (b.way >= SPANS ? b.blocks : 0);
    if (shared_rows) on_cpu(shared_rows, [&] { find_largest(both); });
    on_cpu(a.blocks + b.blocks, [&] { split_operands(both); });
    return 10 * a.way + b.way;
}

extern "C" void add_and_repair(const float* x, const float* y, float* c, char* work, const Sizes* s, int processors,
                               const float* tensor0, const float* tensor1) {
    Operands both = operands(x, y, work, *s, processors);
    Tensors tensors = {{tensor0, tensor1}};
    int64_t size = s->batches * s->m * s->n;
    const float* parts = (const float*)(work + Layout(*s).parts);
    on_cpu((size + 4 * THREADS - 1) / (4 * THREADS), [&] { add_slices(parts, c, tensors, size, (int)s->n, (int)s->slices); });
    on_cpu(3, [&] { repair(both, c, tensors, (int)s->batches, (int)s->shared_b); });
}
