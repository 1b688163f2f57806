#include "kv/paging.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace helm {

Paging::Paging(const Plan& plan, KvCache& kv, DeviceAddress near, Stream& copies, Account& host,
               Account& account)
    : kv_(kv),
      device_(account.device()),
      copies_(copies),
      near_(near),
      slot_bytes_(kv.slot_bytes()),
      evict_above_(
          static_cast<int64_t>(plan.schedule.watermark * static_cast<double>(kv.near().slots()))),
      far_(host, device_, kv.far_bytes(), "the KV cache in host memory"),
      written_(device_.create_event()),
      recalled_(device_.create_event()) {}

// Copies from now on find what has been enqueued on the stream done.
void Paging::follow(Stream& stream) {
  stream.record(*written_);
  copies_.wait(*written_);
}

void Paging::make_room(int64_t blocks, int64_t far_blocks, Stream& stream) {
  follow(stream);
  const SlotPool& near = kv_.near();
  while (near_room() < blocks && kv_.far().free() > far_blocks && kv_.oldest_near()) {
    evict(*kv_.oldest_near());
  }
  reclaim(blocks);
  if (near.free() < blocks) {
    fail(ErrorKind::kCapacity, "[engine] a step takes ", blocks, " new KV blocks, ", near.free(),
         " of ", near.slots(),
         " are free on the GPU and none can be evicted; give the KV cache more ",
         "memory there or close a sequence");
  }
}

void Paging::leave(std::span<const int32_t> blocks, Stream& stream) {
  follow(stream);
  for (const int32_t block : blocks) evict(block);
}

void Paging::evict(int32_t block) {
  if (spare_.empty()) spare_.push_back(device_.create_event());
  const int32_t slot = kv_.evict(block);
  ++evicted_blocks_;
  leaving_.push_back({slot, std::move(spare_.back())});
  spare_.pop_back();
  copies_.download(far_slot(kv_.block(block).far), near_ + slot * slot_bytes_, slot_bytes_);
  copies_.record(*leaving_.back().copied);
}

void Paging::reclaim(int64_t slots) {
  while (kv_.near().free() < slots && !leaving_.empty()) {
    Leaving& oldest = leaving_.front();
    oldest.copied->synchronize();
    kv_.release_near(oldest.slot);
    spare_.push_back(std::move(oldest.copied));
    leaving_.pop_front();
  }
}

void Paging::recall(int32_t block, int64_t far_blocks, Stream& stream) {
  const bool full = kv_.near().free() == 0 && leaving_.empty() && kv_.far().free() <= far_blocks;
  if (full && kv_.oldest_near()) return exchange(block, stream);
  make_room(1, far_blocks, stream);
  come({&block, 1}, stream);
}

void Paging::come(std::span<const int32_t> blocks, Stream& stream) {
  follow(stream);
  reclaim(std::ssize(blocks));
  std::vector<int32_t> left;
  const auto arrive = [&] {
    copies_.record(*recalled_);
    stream.wait(*recalled_);
    recalled_->synchronize();  // before the slots hold other blocks
  };
  try {
    for (const int32_t block : blocks) {
      left.push_back(kv_.recall(block));
      copies_.upload(near_ + kv_.block(block).near * slot_bytes_, far_slot(left.back()),
                     slot_bytes_);
    }
    arrive();
  } catch (...) {
    for (const int32_t slot : left) kv_.release_far(slot);
    throw;
  }
  for (const int32_t slot : left) kv_.release_far(slot);
}

void Paging::exchange(int32_t block, Stream& stream) {
  follow(stream);
  copies_.synchronize();  // pages that visit have been read, too
  std::byte* far = far_slot(kv_.block(block).far);
  const DeviceAddress near = near_ + kv_.exchange(block) * slot_bytes_;
  ++evicted_blocks_;
  constexpr int64_t kMost = int64_t{1} << 20;  // held besides
  std::vector<std::byte> held(static_cast<size_t>(std::min(slot_bytes_, kMost)));
  for (int64_t at = 0; at < slot_bytes_; at += kMost) {
    const int64_t some = std::min(slot_bytes_ - at, kMost);
    std::memcpy(held.data(), far + at, static_cast<size_t>(some));
    copies_.download(far + at, near + at, some);
    copies_.upload(near + at, held.data(), some);
    copies_.synchronize();
  }
}

}  // namespace helm
