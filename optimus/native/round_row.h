/* Included by each file of kernels after its own `largest` and `encode`, with TARGET as the attribute
   that its functions need: one row of the input, rounded group by group. */
TARGET static void round_row(const call_t *call, int64_t row)
{
    const optimus_weight *weight = call->weight;
    const place_t place = optimus_place(call, row);
    int64_t from = (call->first_row + row) * call->stride;
    float scale = 0, inverse = 0;
    for (int64_t g = 0; g < call->groups; g++) {
        int64_t at = g * call->group, left = weight->k - at;
        if (g == 0 || !weight->rows) {
            int64_t valid = weight->rows || left < call->group ? left : call->group;
            scale = optimus_activation_scale(largest(call, from + at, valid), &inverse);
        }
        int32_t sum = encode(call, from + at, call->group, left, inverse,
                             place.codes + at / STEP * place.apart, place.apart);
        optimus_set_start(call, place, g, scale, sum);
    }
}
