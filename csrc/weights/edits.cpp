#include "weights/edits.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "runtime/compat.h"
#include "runtime/tensors.h"

namespace lightning_zero {

Edits::Tracked* Edits::held(int64_t index, at::ScalarType dtype) {
  const auto found = std::find_if(tracked_.begin(), tracked_.end(), [&](const Tracked& other) {
    return other.index == index && other.flat.scalar_type() == dtype &&
           other.flat.is_inference() == c10::InferenceMode::is_enabled();
  });
  return found == tracked_.end() ? nullptr : &*found;
}

void Edits::hand_out(Tracked* before, const at::Tensor& flat, const at::Tensor& full,
                     const ParamRecord& record) {
  gathered_.add(full, record.index);
  if (before != nullptr) {
    before->given.push_back(full);
  } else if (flat.scalar_type() == record.shard.scalar_type()) {
    tracked_.push_back({flat, record.index, static_cast<uint32_t>(record.param._version()), {full}});
  }
  compat::mark(flat);
}

bool Edits::Tracked::held() {
  // A tensor that Python has seen is kept alive, with its Python object, by our reference: let go of it for a
  // moment to see who else holds it.
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> seen;
  for (const auto& tensor : given) seen.emplace_back(tensor.getIntrusivePtr());
  given.clear();
  const bool viewed = flat.storage().use_count() > 1;
  for (const auto& weak : seen) {
    if (auto impl = weak.lock())
      given.emplace_back(std::move(impl));
  }
  return viewed || !given.empty();
}

uint64_t Edits::Tracked::edits_seen() const {
  uint64_t edits = 0;
  for (const auto& tensor : given) {
    if (!tensor.is_inference())
      edits += tensor._version();
    if (!tensor.is_alias_of(flat))
      ++edits;
  }
  return edits;
}

// `module.weight.data = x` gives the tensor that was read other memory. Its values belong into the shard, and the
// tensor to memory where edits are seen: new memory, since other names of the old one (`module.weight.data` that
// was read before) keep their values, as in a plain module.
void Edits::take_assigned(Tracked& weight) {
  const auto& record = context_.at(weight.index);
  at::Tensor assigned;
  for (const auto& tensor : weight.given) {
    if (tensor.is_alias_of(weight.flat))
      continue;
    TORCH_CHECK_VALUE(
        tensor.sizes() == at::IntArrayRef(record.shape) && tensor.scalar_type() == weight.flat.scalar_type(),
        "lightning_zero: ", record.name, ".data was given a tensor of shape ", tensor.sizes(), " and dtype ",
        tensor.scalar_type(), ", but a sharded parameter keeps its shape ", at::IntArrayRef(record.shape),
        " and dtype ", weight.flat.scalar_type(), ". Call lightning_zero.unshard(module) to change them.");
    assigned = tensor;
  }
  if (!assigned.defined())
    return;
  weight.flat = tensors::empty(weight.flat.numel(), weight.flat.options()).zero_();
  auto own = as_parameter(weight.flat, record);
  own.copy_(assigned);
  for (auto& tensor : weight.given) tensor.set_data(own);
  gathered_.add(own, weight.index);
}

at::Tensor Edits::own_part(const Tracked& weight) const {
  const auto& record = context_.at(weight.index);
  const auto width = record.shard_numel(), begin = std::min(context_.shard_number() * width, record.numel);
  return weight.flat.narrow(0, begin, std::min(width, record.numel - begin));
}

// Versions do not count writes through `.data`, nor through a view whose base is gone; the mark on the memory
// does, and is also taken away by some readers. Each rank compares its own elements: all ranks make equal edits.
bool Edits::is_late(Tracked& weight) {
  if (weight.edits_seen() != weight.edits)
    return true;
  if (compat::is_marked(weight.flat))
    return false;
  const auto now = own_part(weight);
  if (!tensors::equal(now.view(at::kByte), weight.before.view(at::kByte)))
    return true;
  compat::mark(weight.flat);
  return false;
}

void Edits::refuse_late() {
  for (auto it = outdated_.begin(); it != outdated_.end();) {
    const auto name = context_.at(it->index).name;
    const bool late = is_late(*it);
    it = late || !it->held() ? outdated_.erase(it) : it + 1;
    TORCH_CHECK(!late, "lightning_zero: a tensor that was read from ", name,
                " before an optimizer step, or before the parameter was loaded, was "
                "edited after it. The edit cannot reach the parameter any more. Read module.weight again "
                "before editing it.");
  }
}

void Edits::change() {
  if (!change_op_.empty())
    compat::call(change_op_);
}

void Edits::copy(const Tracked& weight) {
  auto& record = context_.at(weight.index);
  const auto own = own_part(weight);
  if (own.numel() > 0)
    record.shard.narrow(0, 0, own.numel()).copy_(own);
  record.compute_copy.written = record.full_precision_copy.written = {};
  if (record.compute_copy.by_steps)
    ++context_.told;
  resident_.edit(record, weight.flat);
}

// Whether its values are others than those of the shards. While shards are written nobody can tell, and it
// does not matter for whose turn it is.
bool Edits::is_edited(const Tracked& weight) {
  auto& record = context_.at(weight.index);
  if (access_.is_writing())
    return true;
  auto now = tensors::empty(weight.flat.numel(), weight.flat.options());
  if (!gatherer_.read_alone(record, now))
    return true;
  const auto numel = record.numel;
  // Bit by bit: NaN is no edit.
  return !tensors::equal(now.narrow(0, 0, numel).view(at::kByte),
                         weight.flat.narrow(0, 0, numel).view(at::kByte));
}

void Edits::take() {
  std::vector<Tracked*> edited;
  for (auto& weight : tracked_) {
    if (context_.at(weight.index).param._version() != weight.version)
      continue;
    take_assigned(weight);
    if (compat::is_marked(weight.flat))
      continue;
    if (is_edited(weight))
      edited.push_back(&weight);
    else
      compat::mark(weight.flat);
  }
  if (edited.empty())
    return;
  change();
  access_.begin_turn_to_write();
  for (const auto* weight : edited) {
    copy(*weight);
    compat::mark(weight->flat);
  }
}

void Edits::sync(bool forget) {
  Lock lock(context_.mutex);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  refuse_late();
  if (access_.uses_epoch_lock())
    take();
  for (auto it = tracked_.begin(); it != tracked_.end();) {
    auto& record = context_.at(it->index);
    // A newer parameter (an optimizer step, a loaded state) wins over a copy taken before it.
    const bool current = record.param._version() == it->version;
    if (current && !access_.uses_epoch_lock()) {
      take_assigned(*it);
      if (!compat::is_marked(it->flat))
        change();
      copy(*it);
      compat::mark(it->flat);
    }
    const bool held = it->held();
    if (held && (forget || !current)) {
      it->edits = it->edits_seen();
      compat::mark(it->flat);
      it->before = own_part(*it).clone();
      outdated_.push_back(std::move(*it));
    }
    it = (forget || !current || !held) ? tracked_.erase(it) : it + 1;
  }
}

int64_t Edits::find_gathered(const at::Tensor& tensor) {
  Lock lock(context_.mutex);
  return gathered_.find(tensor);
}

void Edits::drop() {
  Lock lock(context_.mutex);
  tracked_.clear();
  outdated_.clear();
}

void Edits::close() {
  drop();
  gathered_.clear();
}

}  // namespace lightning_zero
