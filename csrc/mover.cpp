#include "mover.h"

#include <stdexcept>

#include "host_mover.h"

namespace vkvmap {

#ifdef VKVMAP_WITH_CUDA
void register_cuda_movers(std::vector<Mover*>& movers);
#endif

namespace {

const std::vector<Mover*>& movers() {
  static const std::vector<Mover*>* all = [] {
    auto* list = new std::vector<Mover*>{host_mover()};
#ifdef VKVMAP_WITH_CUDA
    register_cuda_movers(*list);
#endif
    return list;
  }();
  return *all;
}

}  // namespace

std::vector<std::string> mover_names() {
  std::vector<std::string> names;
  for (const Mover* mover : movers()) names.emplace_back(mover->name());
  return names;
}

Mover& find_mover(const std::string& name) {
  std::string known;
  for (Mover* mover : movers()) {
    if (name == mover->name()) return *mover;
    known += known.empty() ? mover->name() : std::string(", ") + mover->name();
  }
  throw std::invalid_argument("mover '" + name + "': this build has " + known +
                              "; choose one of them, or build with a CUDA compiler");
}

}  // namespace vkvmap
