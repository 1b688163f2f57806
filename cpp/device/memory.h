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
  Account(Device& device, int64_t limit_bytes) : device_(device), limit_bytes_(limit_bytes) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  Device& device() const { return device_; }
  int64_t limit_bytes() const { return limit_bytes_; }
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

// Bytes of an account, given back with their owner. The account must outlive them.
class Claim {
 public:
  Claim() = default;
  Claim(Account& account, int64_t bytes, const char* purpose) : account_(&account), bytes_(bytes) {
    account.take(bytes, purpose);
  }
  ~Claim() {
    if (account_ != nullptr) account_->give_back(bytes_);
  }
  Claim(Claim&& other) noexcept { *this = std::move(other); }
  Claim& operator=(Claim&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  int64_t bytes() const { return bytes_; }

 private:
  Account* account_ = nullptr;
  int64_t bytes_ = 0;
};

// Device memory, released with its owner. The account must outlive it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Account& account, int64_t bytes, const char* purpose)
      : claim_(account, bytes, purpose), device_(&account.device()) {
    if (bytes > 0) address_ = device_->allocate(bytes, purpose);
  }
  ~DeviceMemory() {
    if (address_ != DeviceAddress::kNull) device_->release(address_);
  }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(claim_, other.claim_);
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    return *this;
  }

  DeviceAddress address() const { return address_; }
  int64_t bytes() const { return claim_.bytes(); }

 private:
  Claim claim_;
  Device* device_ = nullptr;
  DeviceAddress address_ = DeviceAddress::kNull;
};

// Page-locked host memory for copies to and from a device. host: the account of the host's memory.
class StagingMemory {
 public:
  StagingMemory() = default;
  StagingMemory(Account& host, Device& device, int64_t bytes, const char* purpose)
      : claim_(host, bytes, purpose),
        device_(&device),
        data_(device.allocate_host(bytes, purpose)) {}
  ~StagingMemory() {
    if (device_ != nullptr) device_->release_host(data_);
  }
  StagingMemory(StagingMemory&& other) noexcept { *this = std::move(other); }
  StagingMemory& operator=(StagingMemory&& other) noexcept {
    std::swap(claim_, other.claim_);
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return claim_.bytes(); }

 private:
  Claim claim_;
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace helm
