// finalize on the CPU: undoes the permutation. Each received slot gets one weighted sum in fp32.
#include "finalize.h"

#include <vector>

#include "real_rows.h"
#include "stages.h"

namespace epmoe::cpu {

#if defined(EPMOE_MUTATE_FINALIZE_GUARD)
constexpr bool kChecked = false;
#else
constexpr bool kChecked = true;
#endif

void finalize(const FinalizeArgs& args) {
  std::vector<float> sum_D(args.D);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_each_slot(args, [&](int64_t slot) {
      finalize_slot<T, kChecked>(args, slot, sum_D.data());
      T* out = static_cast<T*>(args.partial_SD) + slot * args.D;
      for (int64_t d = 0; d < args.D; ++d) out[d] = from_float<T>(sum_D[d]);
    });
  });
}

}  // namespace epmoe::cpu
