// Owned memory on a device, and the account of what a plan may take there.
#pragma once

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "device/device.h"

namespace helm {

// What a plan has taken of a device's memory. Refuses the byte beyond its limit.
class Account {
 public:
  explicit Account(Device& device, int64_t limit_bytes)
      : device_(device), limit_bytes_(limit_bytes) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  Device& device() const { return device_; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }

  void take(int64_t bytes, const char* purpose) {
    if (bytes > limit_bytes_ - used_bytes_) {
      fail(ErrorKind::kMemory, "[memory] ", purpose, " needs ", bytes, " bytes on ",
           device_.describe().name, ", the plan's budget there is ", limit_bytes_, " and ",
           used_bytes_, " are taken; make the plan anew with more memory or a smaller context");
    }
    used_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  }
  void give_back(int64_t bytes) { used_bytes_ -= bytes; }

 private:
  Device& device_;
  int64_t limit_bytes_;
  int64_t used_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// Device memory, released with its owner. The account must outlive it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Account& account, int64_t bytes, const char* purpose) : bytes_(bytes) {
    if (bytes == 0) return;
    account.take(bytes, purpose);
    try {
      address_ = account.device().allocate(bytes, purpose);
    } catch (...) {
      account.give_back(bytes);
      throw;
    }
    account_ = &account;
  }
  ~DeviceMemory() {
    if (account_ == nullptr) return;
    account_->device().release(address_);
    account_->give_back(bytes_);
  }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  DeviceAddress address() const { return address_; }
  int64_t bytes() const { return bytes_; }

 private:
  Account* account_ = nullptr;
  DeviceAddress address_ = DeviceAddress::kNull;
  int64_t bytes_ = 0;
};

// Page-locked host memory for copies to and from a device.
class StagingMemory {
 public:
  StagingMemory() = default;
  StagingMemory(Device& device, int64_t bytes, const char* purpose)
      : device_(&device), data_(device.allocate_host(bytes, purpose)), bytes_(bytes) {}
  ~StagingMemory() {
    if (device_ != nullptr) device_->release_host(data_);
  }
  StagingMemory(StagingMemory&& other) noexcept { *this = std::move(other); }
  StagingMemory& operator=(StagingMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace helm
