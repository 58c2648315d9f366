// The functions for bfloat16, if the processor multiplies in it.

#include "exports.h"

#ifdef __AVX512BF16__
namespace stepwell {
EXPORT(bfloat16, BFloat16)
}  // namespace stepwell
#endif
