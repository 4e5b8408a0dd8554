package postgres

import "testing"

func TestCheckVersion(t *testing.T) {
	t.Parallel()
	for version, ok := range map[string]bool{
		"15.18 (Debian 15.18-0+deb12u1)": true, "18.4": true, "16beta1": true, "": true, "15": true,
		"14.9": false, "12.22 (Ubuntu 12.22-0ubuntu0.20.04.1)": false, "9.6.24": false,
	} {
		if err := checkVersion(version); (err == nil) != ok {
			t.Errorf("%q: %v", version, err)
		}
	}
}
