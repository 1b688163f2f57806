#include "kv/paging.h"

#include <cstring>

#include "base/check.h"

namespace helm {

Paging::Paging(const Plan& plan, KvCache& kv, DeviceAddress near, Stream& copies, Account& host,
               Account& account)
    : kv_(kv),
      device_(account.device()),
      copies_(copies),
      near_(near),
      slot_bytes_(kv.near_layers() * plan.kv.page_bytes()),
      evict_above_(
          static_cast<int64_t>(plan.schedule.watermark * static_cast<double>(kv.near().slots()))),
      far_(host, device_, kv.far_pages() * plan.kv.page_bytes(), "the KV cache in host memory"),
      written_(device_.create_event()),
      recalled_(device_.create_event()) {}

// Copies from now on find what has been enqueued on the stream done.
void Paging::follow(Stream& stream) {
  stream.record(*written_);
  copies_.wait(*written_);
}

void Paging::make_room(int64_t blocks, Stream& stream) {
  follow(stream);
  const SlotPool& near = kv_.near();
  const auto leaving = [&] { return static_cast<int64_t>(leaving_.size()); };
  while (near.used() - leaving() + blocks > evict_above_ && kv_.far().free() > 0 &&
         kv_.oldest_near()) {
    evict_one();
  }
  while (near.free() < blocks && leaving() > 0) reclaim_one();
  if (near.free() < blocks) {
    fail(ErrorKind::kCapacity, "[engine] a step takes ", blocks, " new KV blocks, ", near.free(),
         " of ", near.slots(), " are free on the accelerator and none can be evicted; give the KV ",
         "cache more memory there or close a sequence");
  }
}

void Paging::evict_one() {
  const int32_t block = *kv_.oldest_near();
  const int32_t slot = kv_.evict(block);
  ++evicted_blocks_;
  if (spare_.empty()) spare_.push_back(device_.create_event());
  copies_.download(far_slot(kv_.block(block).far), near_ + slot * slot_bytes_, slot_bytes_);
  copies_.record(*spare_.back());
  leaving_.push_back({slot, std::move(spare_.back())});
  spare_.pop_back();
}

void Paging::reclaim_one() {
  Leaving& oldest = leaving_.front();
  oldest.copied->synchronize();
  kv_.release_near(oldest.slot);
  spare_.push_back(std::move(oldest.copied));
  leaving_.pop_front();
}

void Paging::recall(int32_t block, Stream& stream) {
  const bool full = kv_.near().free() == 0 && leaving_.empty() && kv_.far().free() == 0;
  if (full && kv_.oldest_near()) return exchange(block, stream);
  make_room(1, stream);
  const int32_t slot = kv_.recall(block);
  copies_.upload(near_ + kv_.block(block).near * slot_bytes_, far_slot(slot), slot_bytes_);
  copies_.record(*recalled_);
  stream.wait(*recalled_);
  recalled_->synchronize();  // before the slot holds another block
  kv_.release_far(slot);
}

void Paging::exchange(int32_t block, Stream& stream) {
  follow(stream);
  copies_.synchronize();  // pages that visit have been read, too
  std::byte* far = far_slot(kv_.block(block).far);
  const DeviceAddress near = near_ + kv_.exchange(block) * slot_bytes_;
  ++evicted_blocks_;
  const int64_t page_bytes = slot_bytes_ / kv_.near_layers();
  std::vector<std::byte> page(static_cast<size_t>(page_bytes));
  for (int64_t at = 0; at < slot_bytes_; at += page_bytes) {
    std::memcpy(page.data(), far + at, page.size());
    copies_.download(far + at, near + at, page_bytes);
    copies_.upload(near + at, page.data(), page_bytes);
    copies_.synchronize();
  }
}

}  // namespace helm
